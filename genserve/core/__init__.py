"""What the front ends share. Nothing here may import `genserve.ar`, `genserve.dllm` or `genserve.t2i`."""
