// The only translation unit of the device code.
#include "prelude.cuh"

#include "probe.cuh"
#if __has_include("rows.cuh")
#include "rows.cuh"
#endif
#if __has_include("norm.cuh")
#include "norm.cuh"
#endif
#if __has_include("rope.cuh")
#include "rope.cuh"
#endif
#if __has_include("mlp.cuh")
#include "mlp.cuh"
#endif
#if __has_include("gemm.cuh")
#include "gemm.cuh"
#endif
#if __has_include("gemm_few.cuh")
#include "gemm_few.cuh"
#endif
#if __has_include("lora.cuh")
#include "lora.cuh"
#endif
#if __has_include("attention.cuh")
#include "attention.cuh"
#endif
#if __has_include("cache.cuh")
#include "cache.cuh"
#endif
#if __has_include("head.cuh")
#include "head.cuh"
#endif
#if __has_include("optim.cuh")
#include "optim.cuh"
#endif
