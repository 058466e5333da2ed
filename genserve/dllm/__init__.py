"""Diffusion language models: denoising engines, their dispatcher, and the way to serve them."""
