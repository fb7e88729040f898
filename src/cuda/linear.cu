#include "cuda/kernel.cuh"
