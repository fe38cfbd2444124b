"""Dense models of random weights, and processes that open their exports with diffusers, without ddm-ray."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.flow import Flow
from ddm_ray.models.dit import DiT
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models, matched
from tests.sampling import tiny_components

SEEDS = (5, 2**40, 7, 1)
LABELS: dict[str, Any] = {"class_labels": ["b", 2], "num_images_per_prompt": 2}
TEXTS: dict[str, Any] = {"prompt": ["a b", "c", "", "d e"]}
HEAD = f"""
import json, sys
sys.path += json.loads(sys.argv[2])
try:
    import ddm_ray
except ImportError:
    pass
else:
    sys.exit("ddm-ray is there")
import torch
from diffusers import DiffusionPipeline

torch.set_num_threads(1)
SEEDS, given = {SEEDS}, json.loads(sys.argv[1])

def opened(place, **options):
    pipeline = DiffusionPipeline.from_pretrained(place, trust_remote_code=True, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

"""


def dense(folder: Path, flow: Flow, settings: dict[str, Any], texts: bool, experts: int = 1) -> DDMPipeline:
    """A pipeline of random weights, of texts and latents or of three classes."""
    sizes: dict[str, Any] = {"image_size": 4, "patch_size": 2, "width": 16, "depth": 2, "heads": 2}
    sizes |= {"channels": 4, "num_classes": None, "text_dim": tiny_components.TEXT_DIM} if texts else {"channels": 3}
    if not texts:
        sizes["num_classes"] = 3
    models = [matched(tiny_components.random(DiT, seed, **sizes).eval(), flow) for seed in range(experts)]
    num_classes = sizes["num_classes"]
    info = MixtureInfo(experts, (sizes["channels"], 4, 4), num_classes, torch.ones((num_classes or 0) + 1, experts))
    return DDMPipeline(
        Models(info, models, None),
        class_names=() if texts else ("a", "b", "c"),
        defaults=SamplingSettings(**settings),
        text_encoder=tiny_components.text_encoder(folder / "encoder") if texts else None,
        latents=tiny_components.latents() if texts else None,
    )


def run_alone(script: str, given: Any, home: Path, **environment: str) -> str:
    """What a script says in a process that can't import ddm-ray, has nothing of a hub and finds `given` as it is.

    It has `opened(place)`, a pipeline by diffusers; and no hub unless the environment names one.
    """
    line = [sys.executable, "-I", "-S", "-c", HEAD + script, json.dumps(given)]
    line += [json.dumps([sysconfig.get_paths()["purelib"]])]
    variables = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(home), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, env=variables | environment, cwd="/", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr
