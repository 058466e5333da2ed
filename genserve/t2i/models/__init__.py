"""Diffusion models as workflow nodes, a file per family, over the modules of diffusers."""
