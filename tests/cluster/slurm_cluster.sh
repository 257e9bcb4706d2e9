#!/usr/bin/env bash
# A real SLURM of two nodes on this machine, for the tests: Debian's slurm-wlm and munge, as root. From a terminal:
#   tests/cluster/slurm_cluster.sh FOLDER       runs until Ctrl-D; it says which SLURM_CONF reaches it
# It lives in namespaces of its own. /etc/hosts is another one for its processes only, and when its input ends (or what
# started it does), its first process ends and with it all others of the namespace, jobs too. Its ports are free ones and
# its munge has a socket and a key of its own, so it runs beside a SLURM that is there and knows nothing of it.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
folder=$(realpath -m "${1:?Type: $0 FOLDER}")
host=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf

fail() {
    echo "$1" >&2
    exit 1
}

if [ "${2:-}" != inside ]; then
    [ "$(id -u)" = 0 ] || fail "A SLURM of its own needs root; nothing else does."
    command -v slurmctld >/dev/null && command -v munged >/dev/null ||
        fail "SLURM is not installed. Type: apt-get install slurm-wlm munge (or: make test-cluster, which does it)"
    unshare --mount --pid --fork --mount-proc true 2>/dev/null ||
        fail "This machine allows no namespaces (unshare --mount --pid), which the cluster lives in."
    mkdir -p "$folder"
    [ -z "$(ls -A "$folder")" ] || fail "$folder is not empty. Choose another folder."
    exec unshare --mount --pid --fork --mount-proc --kill-child=KILL "$0" "$folder" inside
fi

free_ports() { # free_ports COUNT: such ports of 127.0.0.1, in sequence
    local first next
    for first in $(seq 17000 10 19000); do
        for ((next = first; next < first + $1; next++)); do
            ! (exec 3<>"/dev/tcp/127.0.0.1/$next") 2>/dev/null || continue 2
        done
        seq "$first" $((first + $1 - 1))
        return
    done
    fail "No $1 free ports in sequence between 17000 and 19000."
}

# Processes of a job find each other by the names of their nodes.
{
    cat /etc/hosts
    echo "127.0.0.1 node1 node2"
} >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

mkdir -p "$folder"/{ctld,d.node1,d.node2,log,gpu,munge}
chmod 711 "$folder/munge"
(umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
for i in 0 1; do mknod "$folder/gpu/nvidia$i" c 1 3; done # devices to count, not to compute on
echo "NodeName=node[1-2] Name=gpu File=$folder/gpu/nvidia[0-1]" >"$folder/gres.conf"
read -r -d '' controller node1 node2 < <(free_ports 3) || true
cat >"$SLURM_CONF" <<CONF
ClusterName=vla-torchrl
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/ctld
SlurmdSpoolDir=$folder/d.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=defer,sched_interval=3,bf_interval=3
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=30
MinJobAge=3600
OverTimeLimit=0
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$node1 CPUs=4 RealMemory=8000 Gres=gpu:2
NodeName=node2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$node2 CPUs=4 RealMemory=8000 Gres=gpu:2
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=node[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF

# None of them keeps our input and output: they end when those do.
{
    # --force: its folder need not be open to other users, the cluster has one.
    munged --foreground --force --socket="$folder/munge/socket" --key-file="$folder/munge/key" \
        --pid-file="$folder/munge/pid" --seed-file="$folder/munge/seed" --log-file="$folder/log/munged.log" &
    slurmctld -D -c -f "$SLURM_CONF" &
    for node in node1 node2; do slurmd -D -N "$node" -f "$SLURM_CONF" & done
} </dev/null >"$folder/log/output" 2>&1

while [ $SECONDS -lt 60 ]; do
    if [ "$(timeout 5 sinfo -h -o %T 2>/dev/null | sort -u)" = idle ]; then
        echo "ready: export SLURM_CONF=$SLURM_CONF"
        cat >/dev/null # until the input ends
        exit 0
    fi
    [ "$(jobs -pr | wc -l)" = 4 ] || break # munged, slurmctld and two slurmd
    sleep 0.2
done
fail "SLURM does not start here. $(tail -n 5 "$folder"/log/*)"
