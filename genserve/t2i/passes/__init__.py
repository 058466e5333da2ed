"""Graph passes, a file each: a pure function from graph to graph (LegoDiffusion §4.2)."""
