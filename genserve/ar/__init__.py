"""Autoregressive language models: engine controller, worker, library and composition root."""
