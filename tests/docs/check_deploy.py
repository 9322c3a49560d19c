#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks the files in deploy/ as far as a machine without Slurm and Kubernetes can.

    check_deploy.py [GRADSYNC_TRAIN]    with the trainer, ranks are started as the files say; exits with 77 if something could not be checked
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLURM, KUBERNETES = ROOT / "deploy/slurm", ROOT / "deploy/kubernetes"
SBATCH_OPTIONS = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time"}
SRUN_OPTIONS = {"mpi": ("none", "pmix"), "kill-on-bad-exit": ("0",), "cpus-per-task": ("2",), "gpu-bind": ("none",)}
NODES, PER_NODE = 1, 2

# Starts the ranks as local processes, with the variables that srun sets. Its own arguments go to the file $SRUN_ARGUMENTS.
FAKE_SRUN = """#!/usr/bin/env bash
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
printf '%s\\n' "${options[@]}" >"$SRUN_ARGUMENTS"
processes=() status=0
for ((rank = 0; rank < SLURM_NTASKS; ++rank)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_ID=0 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST "$@" &
    processes+=($!)
done
for process in "${processes[@]}"; do wait "$process" || status=$?; done
exit $status
"""


def expect(condition, what):
    if not condition:
        sys.exit(f"check_deploy: {what}")


def run(command, **more):
    try:
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, **more)
    except subprocess.TimeoutExpired as over:
        sys.exit(f"check_deploy: {over}\n{over.stdout}\n{over.stderr}")


KEPT = []


def free_port():
    """A port that nobody else gets before this program ends; who listens there may reuse it."""
    KEPT.append(socket.socket())
    KEPT[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    KEPT[-1].bind(("127.0.0.1", 0))
    return KEPT[-1].getsockname()[1]


def own_name():
    """This machine's name, if it has an address: then the token is needed, as between machines."""
    try:
        return socket.getaddrinfo(socket.gethostname(), None)[0] and socket.gethostname()
    except OSError:
        return "localhost"


def without_launchers():
    return {name: value for name, value in os.environ.items() if not re.match("SLURM_|OMPI_|PMI|MASTER_|RANK$|WORLD_SIZE$|LOCAL_RANK$|GRADSYNC_", name)}


def train(*more):
    return ["--model", "mlp", "--d-model", "4", "--context", "4", "--hidden", "8", "--micro-batch", "4", "--steps", "3", "--data", __file__, "--timeout", "30", *more]


def check_sbatch(script, folder, trainer):
    """Lints a script, and runs it in `folder` with a fake srun."""
    for linter in (["bash", "-n"], ["shellcheck"]):
        if shutil.which(linter[0]):
            done = run([*linter, script])
            expect(done.returncode == 0, f"{' '.join(linter)}: {done.stdout}{done.stderr}")
    lines = script.read_text().splitlines()
    expect(lines[0] == "#!/bin/bash", f"{script}: sbatch wants an interpreter in the first line")
    commands = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    for i, line in enumerate(lines):
        if line.startswith("#SBATCH"):
            option = re.fullmatch(r"#SBATCH --([a-z-]+)=(\S+)", line)
            expect(option and option[1] in SBATCH_OPTIONS, f"{script}: is this an option of sbatch? {line}")
            expect(i < commands, f"{script}: sbatch does not read options behind the first command: {line}")
            number = re.fullmatch(r"\d\d:\d\d:\d\d" if option[1] == "time" else r"\d+", option[2])
            expect(number or option[1] == "job-name", f"{script}: is this a value? {line}")

    expect(run(["bash", script]).returncode == 2, f"{script}: it starts nothing, and does not say so")
    environment = {**without_launchers(), "PATH": f"{folder}:{os.environ['PATH']}", "SRUN_ARGUMENTS": str(folder / "arguments"), "SLURM_JOB_ID": "4711",
                   "SLURM_JOB_NODELIST": own_name(), "SLURM_NTASKS": str(NODES * PER_NODE), "SLURM_CPUS_PER_TASK": "2",
                   "GRADSYNC_PORT": str(free_port())}
    (folder / "srun").write_text(FAKE_SRUN)
    (folder / "srun").chmod(0o755)
    if not shutil.which("openssl"):
        (folder / "openssl").write_text("#!/bin/sh\necho 0123456789abcdef0123456789abcdef\n")
        (folder / "openssl").chmod(0o755)
    done = run(["bash", script, "sh", "-c", 'echo "$SLURM_PROCID ${#GRADSYNC_JOB_TOKEN} $OMP_NUM_THREADS$OPENBLAS_NUM_THREADS"'], env=environment)
    token, threads = ("0" if script.stem == "mpi" else "32"), ("" if script.stem == "nccl" else "22")
    expected = sorted(f"{rank} {token} {threads}" for rank in range(NODES * PER_NODE))
    expect((done.returncode, sorted(line.rstrip() for line in done.stdout.splitlines())) == (0, [line.rstrip() for line in expected]), f"{script}: {done}")
    for argument in (folder / "arguments").read_text().split():
        option = re.fullmatch(r"--([a-z-]+)=(\S+)", argument)
        expect(option and option[2] in SRUN_OPTIONS.get(option[1], ()), f"{script}: is this an option of srun? {argument}")
    expect(run(["bash", script, "false"], env=environment).returncode == 1, f"{script}: it hides a failure")

    if trainer and script.stem == "tcp":
        done = run(["bash", script, trainer, "--backend", "tcp", *train()], env=environment)
        expect(done.returncode == 0 and "2 processes that share memory" in done.stdout, f"{script}: {done.stdout}{done.stderr}")
        print(f"{script.name} trained on two ranks")


def containers(template):
    return template["spec"]["containers"]


def check_container(where, container):
    expect(re.fullmatch(r"registry\.example\.com/[a-z]+:\d+", container["image"]), f"{where}: {container['image']}: a name and version of nobody's")
    expect(all(isinstance(word, str) for word in [*container["command"], *container.get("args", [])]), f"{where}: quote the numbers among command and args")
    for variable in container.get("env", []):
        expect(isinstance(variable.get("value", ""), str), f"{where}: quote the value of {variable['name']}")
        expect(("value" in variable) != ("valueFrom" in variable), f"{where}: {variable['name']} needs one value")


def check_tcp_job(file, documents, trainer):
    service, job = documents
    expect((service["apiVersion"], service["kind"], job["apiVersion"], job["kind"]) == ("v1", "Service", "batch/v1", "Job"), f"{file}: a Service and a Job")
    name, spec, template = job["metadata"]["name"], job["spec"], job["spec"]["template"]
    container, = containers(template)
    check_container(file, container)
    expect(service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}, f"{file}: the Service must be headless, and the Job's")
    expect(template["spec"]["subdomain"] == service["metadata"]["name"], f"{file}: subdomain must be the Service")
    expect(spec["completionMode"] == "Indexed" and template["spec"]["restartPolicy"] == "Never", f"{file}: the Job must be indexed, and restart nothing")
    env = {variable["name"]: variable for variable in container["env"]}
    ranks = spec["completions"]
    expect(ranks == spec["parallelism"] == int(env["WORLD_SIZE"]["value"]), f"{file}: completions, parallelism and WORLD_SIZE differ")
    expect(env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']", f"{file}: RANK")
    expect(env["MASTER_ADDR"]["value"] == f"{name}-0.{service['metadata']['name']}", f"{file}: MASTER_ADDR must be pod 0")
    expect(int(env["MASTER_PORT"]["value"]) == service["spec"]["ports"][0]["port"], f"{file}: the ports differ")
    secret = env["GRADSYNC_JOB_TOKEN"]["valueFrom"]["secretKeyRef"]
    made = f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}="
    for place in (file, ROOT / "docs/guides/clusters.md"):
        expect(made in place.read_text(), f"{place}: it does not say how the secret is made: {made}...")
    if not trainer:
        return
    # The pods' processes, here: only rank 0's address and port are others.
    values = {name: variable["value"] for name, variable in env.items() if "value" in variable}
    values |= {"MASTER_ADDR": own_name(), "MASTER_PORT": str(free_port()), "GRADSYNC_JOB_TOKEN": os.urandom(16).hex()}
    outputs = run_pods(file, trainer, container, values, ranks)
    expect(f"{ranks} processes" in outputs[0], f"{file}: {outputs}")


def run_pods(file, trainer, container, values, ranks):
    """Runs the processes of the pods with these variables, and returns what they print."""
    started = [subprocess.Popen([trainer, *container["args"], *train()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**without_launchers(), **values, "RANK": str(rank)}) for rank in range(ranks)]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    expect([process.returncode for process in started] == ranks * [0], f"{file}: {outputs}")
    print(f"{file.name} trained on {ranks} ranks")
    return outputs


def check_elastic_job(file, documents, trainer):
    job, = documents
    spec, template = job["spec"], job["spec"]["template"]
    expect((job["apiVersion"], job["kind"]) == ("batch/v1", "Job"), f"{file}: a Job")
    container, = containers(template)
    check_container(file, container)
    expect(spec["completionMode"] == "Indexed" and template["spec"]["restartPolicy"] == "Never", f"{file}: the Job must be indexed")
    env = {variable["name"]: variable for variable in container["env"]}
    ranks = spec["completions"]
    expect(ranks == spec["parallelism"] == int(env["WORLD_SIZE"]["value"]) == int(env["GRADSYNC_RANKS"]["value"].split(":")[1]), f"{file}: numbers of ranks differ")
    fields = {name: variable["valueFrom"]["fieldRef"]["fieldPath"] for name, variable in env.items() if "fieldRef" in variable.get("valueFrom", {})}
    expect(fields == {"RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']", "MASTER_ADDR": "status.podIP",
                      "JOB": "metadata.labels['batch.kubernetes.io/controller-uid']"}, f"{file}: {fields}")
    names = list(env)  # Kubernetes replaces $(JOB) by what stands before
    expect(re.fullmatch(r"etcd://([a-z0-9.-]+:2379,){2}[a-z0-9.-]+:2379/train/\$\(JOB\)", env["GRADSYNC_STORE"]["value"]) and
           names.index("JOB") < names.index("GRADSYNC_STORE"), f"{file}: GRADSYNC_STORE")
    for variable in ("GRADSYNC_JOB_TOKEN", "ETCDCTL_PASSWORD"):
        secret = env[variable]["valueFrom"]["secretKeyRef"]
        made = f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}="
        expect(made in file.read_text(), f"{file}: it does not say how the secret is made: {made}...")
    if not trainer:
        return
    # The pods' processes, here, with a folder instead of etcd.
    with tempfile.TemporaryDirectory() as folder:
        values = {name: variable["value"] for name, variable in env.items() if "value" in variable}
        values |= {"MASTER_ADDR": own_name(), "GRADSYNC_STORE": folder, "GRADSYNC_JOB_TOKEN": os.urandom(16).hex()}
        run_pods(file, trainer, container, values, ranks)


def check_mpi_job(file, documents):
    job, = documents
    expect((job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob"), f"{file}: an MPIJob")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    for replicas in (launcher, worker):
        for container in containers(replicas["template"]):
            check_container(file, container)
    expect(launcher["replicas"] == 1, f"{file}: one launcher")
    mpirun, = containers(launcher["template"])
    sshd, = containers(worker["template"])
    expect(mpirun["image"] == sshd["image"], f"{file}: the images differ")
    arguments = mpirun["args"]
    expect(mpirun["command"] == ["mpirun"] and int(arguments[arguments.index("-n") + 1]) == job["spec"]["slotsPerWorker"] * worker["replicas"],
           f"{file}: -n is not slotsPerWorker times the workers")
    passed = {arguments[i + 1] for i, word in enumerate(arguments) if word == "-x"}
    expect(passed == {variable["name"] for variable in mpirun["env"]}, f"{file}: mpirun passes on {passed}")
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    expect({mount["name"] for mount in sshd["volumeMounts"]} == volumes, f"{file}: volumes and mounts differ")


def main():
    trainer = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None
    skipped = [] if trainer else ["no trainer was started"]
    scripts = sorted(SLURM.iterdir())
    expect([script.name for script in scripts] == ["mpi.sbatch", "nccl.sbatch", "tcp.sbatch"], f"deploy/slurm has {scripts}")
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            check_sbatch(script, pathlib.Path(folder), trainer)
    readme = (ROOT / "deploy/README.md").read_text()
    for file in [*scripts, *sorted(KUBERNETES.iterdir())]:
        expect(f"`{file.parent.name}/{file.name}`" in readme, f"deploy/README.md does not name {file.name}")
    try:
        import yaml
    except ImportError:
        skipped.append("deploy/kubernetes was not read: Python has no yaml (apt-get install python3-yaml)")
    else:
        documents = {file.name: list(yaml.safe_load_all(file.read_text())) for file in KUBERNETES.iterdir()}
        expect(sorted(documents) == ["elastic-job.yaml", "mpijob.yaml", "tcp-job.yaml"], f"deploy/kubernetes has {sorted(documents)}")
        check_tcp_job(KUBERNETES / "tcp-job.yaml", documents["tcp-job.yaml"], trainer)
        check_elastic_job(KUBERNETES / "elastic-job.yaml", documents["elastic-job.yaml"], trainer)
        check_mpi_job(KUBERNETES / "mpijob.yaml", documents["mpijob.yaml"])
    if skipped:
        print("skipped:", "; ".join(skipped))
        sys.exit(77)


main()
