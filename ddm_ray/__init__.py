"""ddm-ray: train one diffusion model on computers that never talk to each other, and serve it."""

__version__ = "0.1.0"
