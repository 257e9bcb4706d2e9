# The library and its simulators as `make setup` installs them, for Docker and Apptainer: docs/how-to/container.md.
#   docker build -t vla-torchrl .
# A CPU build of torch: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim-bookworm

# git: GitPython, which CALVIN imports, wants it. The libraries are those of docs/install.md, and what SAPIEN and OpenCV need.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        git make libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6 libx11-6 libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*

# Another user may run it (docker run --user, Apptainer): all may read what is installed.
RUN useradd --uid 1000 --create-home --home-dir /opt/vla vla
WORKDIR /opt/vla/vla-torchrl
COPY Makefile pyproject.toml constraints.txt setup.py README.md LICENSE ./
COPY recipes recipes
COPY scripts scripts
COPY vla_algos vla_algos
COPY vla_common vla_common
COPY vla_envs vla_envs
COPY vla_policies vla_policies

ARG EXTRAS=metaworld,libero,maniskill,calvin,robotwin
ARG PIP_EXTRA_INDEX_URL=
# As root, so that set-up installs what drawing on a CPU lacks; with the home of the user, whose cache has the driver.
RUN HOME=/opt/vla PIP_NO_CACHE_DIR=1 make setup EXTRAS="$EXTRAS" \
    && rm -rf /var/lib/apt/lists/* \
    && chmod -R a+rX /opt/vla \
    && chown -R vla:vla /opt/vla \
    && mkdir -m 1777 /cache /assets /work

# What is downloaded or compiled at run time goes to /cache: mount a folder there to keep it. A GPU draws too: graphics.
ENV PATH=/opt/vla/vla-torchrl/.venv/bin:$PATH \
    HOME=/opt/vla \
    HF_HOME=/cache/huggingface \
    NUMBA_CACHE_DIR=/cache/numba \
    MPLCONFIGDIR=/cache/matplotlib \
    VLA_TORCHRL_ASSETS=/assets \
    NVIDIA_DRIVER_CAPABILITIES=compute,graphics,utility
USER vla
WORKDIR /work
CMD ["python", "-m", "vla_envs"]
