"""Ready-made workflows, one function a family, short enough to read as documentation.

    from genserve.t2i.workflows import sd3
    workflow = sd3("stabilityai/stable-diffusion-3-medium-diffusers", mode="inpaint")

A new family is a file of models and a file here.
"""

from genserve.t2i.workflows.flux_1 import flux
from genserve.t2i.workflows.limits import check, family_of, limits
from genserve.t2i.workflows.stable_diffusion_3 import sd3
from genserve.t2i.workflows.stable_diffusion_15 import sd15
from genserve.t2i.workflows.stable_diffusion_xl import sdxl

FAMILIES = {"sd15": sd15, "sdxl": sdxl, "sd3": sd3, "flux": flux}

__all__ = ["FAMILIES", "check", "family_of", "flux", "limits", "sd3", "sd15", "sdxl"]
