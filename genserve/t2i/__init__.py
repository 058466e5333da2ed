"""Text-to-image workflows: a Python DSL, its compiler, and a coordinator of model nodes (LegoDiffusion)."""
