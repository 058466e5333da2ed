"""Ready-made workflows, one function a family, short enough to read as documentation.

from genserve.t2i.workflows import sd3
workflow = sd3("stabilityai/stable-diffusion-3-medium-diffusers", mode="inpaint")
"""

from genserve.t2i.workflows.stable_diffusion_3 import sd3

__all__ = ["sd3"]
