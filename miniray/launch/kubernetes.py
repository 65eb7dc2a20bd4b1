"""`miniray k8s manifest`: a Job and its Service, a JobSet or a LeaderWorkerSet; no secret."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from miniray.common.host_port import DEFAULT_PORT, join_host_port
from miniray.launch.allocation import HEAD_VARIABLE, SIZE_VARIABLE

#: Where the Secret is mounted.
_SECRET_FOLDER = "/var/run/secrets/miniray"  # noqa: S105 - a path
#: Seconds beyond the grace of the run until Kubernetes kills what is left.
_RESERVE = 10
#: Whom the pods run as; the Secret's files belong to that group.
_USER = 1000
#: Names of pods are the Job's, an index, and five more characters: at most 63.
_LONGEST_NAME = 50
#: The name of the only Job of a JobSet.
_REPLICATED = "run"


@dataclasses.dataclass(frozen=True)
class KubernetesJob:
    """The Job of a manifest."""

    name: str
    image: str
    command: tuple[str, ...]
    #: Made by ``kubectl create secret generic NAME --from-file FOLDER``.
    secret: str
    nodes: int = 1
    #: Amounts of each pod as Kubernetes takes them; ``32Gi`` of memory.
    cpus: str | None = None
    memory: str | None = None
    gpus: int | None = None
    wait: int = 300
    grace: int = 30
    #: Kueue's queue, which starts the Job.
    queue: str | None = None
    #: "job", "jobset" or "lws".
    kind: str = "job"

    def __post_init__(self) -> None:
        longest = _LONGEST_NAME - (self.kind == "jobset") * len(f"-{_REPLICATED}-0")
        for what in ("name", "secret"):
            name = getattr(self, what)
            if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
                raise ValueError(
                    f"{what} must be of at most {longest} small letters, digits and -, and "
                    f"begin with a letter, not {name!r}."
                )


def manifest(job: KubernetesJob) -> str:
    """Return the YAML of a Job and of the Service by which its pods find the first one."""
    return "".join(f"---\n{_yaml(document)}" for document in documents(job))


def documents(job: KubernetesJob) -> list[dict[str, Any]]:
    """Return the objects of the manifest."""
    labels = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "miniray"}
    queued = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}
    template = {"metadata": {"labels": labels}, "spec": _pod(job, labels)}
    suspended = {"suspend": True} if job.queue and job.kind != "lws" else {}
    indexed = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "template": template,
    }
    replicated = {"name": _REPLICATED, "replicas": 1, "template": {"spec": indexed}}
    job_set = {
        "replicatedJobs": [replicated],
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": 0},
        **suspended,
    }
    group = {
        "size": job.nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "workerTemplate": template,
    }
    kind, version, spec = {
        "job": ("Job", "batch/v1", {**indexed, **suspended}),
        "jobset": ("JobSet", "jobset.x-k8s.io/v1alpha2", job_set),
        "lws": (
            "LeaderWorkerSet",
            "leaderworkerset.x-k8s.io/v1",
            {"replicas": 1, "leaderWorkerTemplate": group},
        ),
    }[job.kind]
    main = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": job.name, "labels": {**labels, **queued}},
        "spec": spec,
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": labels},
        # Pods look for the first one before it is ready, and are never "ready" themselves.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    # The controllers of the other kinds make a service of their own.
    return [service, main] if job.kind == "job" else [main]


def _pod(job: KubernetesJob, labels: dict[str, str]) -> dict[str, Any]:
    return {
        **({"subdomain": job.name} if job.kind == "job" else {}),
        # A LeaderWorkerSet starts ended pods again: it has no other policy.
        "restartPolicy": "Always" if job.kind == "lws" else "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": job.grace + _RESERVE,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ],
        "volumes": [{"name": "token", "secret": {"secretName": job.secret, "defaultMode": 0o400}}],
        "containers": [_container(job)],
    }


def _container(job: KubernetesJob) -> dict[str, Any]:
    amounts = {
        "cpu": job.cpus,
        "memory": job.memory,
        "nvidia.com/gpu": str(job.gpus) if job.gpus else None,
    }
    limits = {name: amount for name, amount in amounts.items() if amount is not None}
    options = ("--authority", _SECRET_FOLDER, "--wait", str(job.wait), "--grace", str(job.grace))
    # Without the cluster's domain, which not every cluster calls cluster.local.
    first = f"{job.name}-{_REPLICATED}-0-0" if job.kind == "jobset" else f"{job.name}-0"
    place = {
        SIZE_VARIABLE: str(job.nodes),
        HEAD_VARIABLE: join_host_port(f"{first}.{job.name}", DEFAULT_PORT),
    }
    if job.kind == "lws":  # which sets variables of its own
        place = {}
    return {
        "name": "run",
        "image": job.image,
        "command": ["miniray", "run", *options, "--", *job.command],
        **({"env": [{"name": n, "value": place[n]} for n in place]} if place else {}),
        **({"resources": {"requests": limits, "limits": limits}} if limits else {}),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "token", "mountPath": _SECRET_FOLDER, "readOnly": True}],
    }


def _yaml(value: dict[str, Any] | list[Any], indent: int = 0) -> str:
    """Return YAML. Scalars are JSON, which YAML contains: a library does the quoting."""
    pairs = value.items() if isinstance(value, dict) else ((None, each) for each in value)
    lines = []
    for key, each in pairs:
        begin = " " * indent + ("-" if key is None else f"{key}:")
        if isinstance(each, (dict, list)) and each:
            inner = _yaml(each, indent + 2)
            # The first line of an item stands beside its dash.
            lines.append(f"{begin} {inner.lstrip()}" if key is None else f"{begin}\n{inner}")
        else:
            lines.append(f"{begin} {json.dumps(each)}\n")
    return "".join(lines)
