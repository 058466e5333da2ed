"""CPU kernels, compiled by Numba at first use and cached on disk: no compiler is needed."""
