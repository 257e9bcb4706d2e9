#!/usr/bin/env bash
# A real SLURM of two nodes on this machine, for the tests: Debian's slurm-wlm and munge, started by hand as root. Its files
# are in a folder of their own; of the machine's own configuration only the names of the nodes in /etc/hosts are touched.
#   export SLURM_CONF=/var/lib/vla-torchrl-slurm/slurm.conf
#   tests/slurm_cluster.sh start | stop
set -euo pipefail
state=/var/lib/vla-torchrl-slurm
host=$(hostname -s)
names="127.0.0.1 node1 node2 # tests of vla-torchrl"
export SLURM_CONF=$state/slurm.conf

stop() {
    for name in slurmctld slurmd slurmstepd; do pkill -x "$name" || true; done
    for _ in $(seq 50); do pgrep -x slurmctld >/dev/null || pgrep -x slurmd >/dev/null || break; sleep 0.1; done
    for name in slurmctld slurmd; do pkill -9 -x "$name" || true; done
    grep -v "$names" /etc/hosts >/tmp/hosts.$$ || true
    cat /tmp/hosts.$$ >/etc/hosts # a container's cannot be replaced
    rm /tmp/hosts.$$
}

start() {
    stop
    command -v slurmctld >/dev/null || {
        apt-get install -y --no-install-recommends slurm-wlm munge ||
            { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge; }
    } >/dev/null
    install -d -o munge -g munge -m 755 /run/munge /var/log/munge /var/lib/munge
    pgrep -x munged >/dev/null || su -s /bin/sh munge -c /usr/sbin/munged
    echo "$names" >>/etc/hosts # processes of a job find each other by name
    rm -rf "$state"
    mkdir -p "$state"/{ctld,d.node1,d.node2,log,gpu}
    for i in 0 1; do mknod "$state/gpu/nvidia$i" c 1 3; done  # devices to count, not to compute on
    echo "NodeName=node[1-2] Name=gpu File=$state/gpu/nvidia[0-1]" >"$state/gres.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=vla-torchrl
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/d.%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
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
NodeName=node[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4 RealMemory=8000 Gres=gpu:2
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=node[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
    slurmctld -c -f "$SLURM_CONF"
    sleep 1
    slurmd -N node1 -f "$SLURM_CONF"
    slurmd -N node2 -f "$SLURM_CONF"
    for _ in $(seq 100); do
        [ "$(sinfo -h -o %T 2>/dev/null | sort -u)" = idle ] && exit 0
        sleep 0.2
    done
    sinfo || true
    tail -5 "$state"/log/*.log
    exit 1
}

"$1"
