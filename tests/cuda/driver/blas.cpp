// cuBLAS, by its documentation (https://docs.nvidia.com/cuda/cublas/), as far as crates/kernels/src/cuda/nvidia.rs calls it.
#include "state.h"

using namespace fake;

extern "C" {

struct Blas {
    Stream* stream = nullptr;
    bool own_workspace = false;
};

enum : int { BLAS_OK = 0, BLAS_NOT_INITIALIZED = 1, BLAS_INVALID = 7, BLAS_FAILED = 13 };
enum : int { F32 = 0, BF16 = 14, COMPUTE_32F = 68 };

int cublasCreate_v2(Blas** handle) {
    if (current == nullptr) return BLAS_NOT_INITIALIZED;
    NOT_CAPTURING();
    *handle = new Blas;
    return called(__func__) == CUDA_SUCCESS ? BLAS_OK : BLAS_NOT_INITIALIZED;
}

int cublasDestroy_v2(Blas* handle) {
    NOT_CAPTURING();
    delete handle;
    return BLAS_OK;
}

// Sets the workspace back to cuBLAS's own.
int cublasSetStream_v2(Blas* handle, CUstream stream) {
    handle->stream = of(stream);
    handle->own_workspace = false;
    return BLAS_OK;
}

int cublasSetMathMode(Blas*, int) { return BLAS_OK; }

int cublasSetWorkspace_v2(Blas* handle, void* workspace, size_t bytes) {
    if (uint64_t(workspace) % 256 != 0) return BLAS_INVALID;
    on_device("cuBLAS's workspace", uint64_t(workspace), bytes);
    handle->own_workspace = true;
    return BLAS_OK;
}

int cublasGemmEx(Blas* handle, int turn_a, int turn_b, int m, int n, int k, const void* alpha, const void* a, int type_a,
                 int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int compute,
                 int) {
    CUresult answer = called(__func__);
    if (answer == CUDA_ERROR_OUT_OF_MEMORY) return 3;
    if (answer != CUDA_SUCCESS || current == nullptr || driver().sticky != 0) return BLAS_FAILED;
    if (!handle->own_workspace) misuse("cuBLAS without a workspace of a fixed address");
    bool known_types = type_a == type_b && (type_a == F32 || type_a == BF16) && (type_c == F32 || type_c == type_a);
    if (!known_types || compute != COMPUTE_32F) return 15;
    if (m < 0 || n < 0 || k < 0 || lda < std::max(1, turn_a ? k : m) || ldb < std::max(1, turn_b ? n : k) || ldc < std::max(1, m))
        return BLAS_INVALID;
    float factor = *static_cast<const float*>(alpha), kept = *static_cast<const float*>(beta);
    answer = ask(handle->stream, [=] {
        auto bytes = [](int type) { return size_t(type == F32 ? 4 : 2); };
        auto check = [&](const char* what, const void* at, int type, int rows, int columns, int stride) {
            if (rows > 0 && columns > 0) on_device(what, uint64_t(at), bytes(type) * (size_t(columns - 1) * size_t(stride) + size_t(rows)));
        };
        check("a matrix of a product", a, type_a, turn_a ? k : m, turn_a ? m : k, lda);
        check("a matrix of a product", b, type_b, turn_b ? n : k, turn_b ? k : n, ldb);
        check("a product", c, type_c, m, n, ldc);
        auto get = [](const void* at, int type, size_t place) {
            if (type == F32) return static_cast<const float*>(at)[place];
            uint32_t bits = uint32_t(static_cast<const uint16_t*>(at)[place]) << 16;
            float x;
            memcpy(&x, &bits, 4);
            return x;
        };
        std::vector<float> left(size_t(m) * size_t(k)), sums;
        for (int j = 0; j < k; j++)
            for (int i = 0; i < m; i++)
                left[size_t(j) * size_t(m) + size_t(i)] =
                    get(a, type_a, turn_a ? size_t(i) * size_t(lda) + size_t(j) : size_t(j) * size_t(lda) + size_t(i));
        for (int column = 0; column < n; column++) {
            sums.assign(size_t(m), 0.0f);
            // From the last to the first: nothing may rest on an order.
            for (int j = k - 1; j >= 0; j--) {
                float x = get(b, type_b, turn_b ? size_t(j) * size_t(ldb) + size_t(column) : size_t(column) * size_t(ldb) + size_t(j));
                const float* from = &left[size_t(j) * size_t(m)];
                for (int i = 0; i < m; i++) sums[size_t(i)] += from[i] * x;
            }
            for (int i = 0; i < m; i++) {
                size_t place = size_t(column) * size_t(ldc) + size_t(i);
                // With beta = 0 what was there is not read.
                float y = factor * sums[size_t(i)] + (kept == 0.0f ? 0.0f : kept * get(c, type_c, place));
                if (type_c == F32) {
                    static_cast<float*>(c)[place] = y;
                } else {
                    uint32_t bits;
                    memcpy(&bits, &y, 4);
                    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
                    static_cast<uint16_t*>(c)[place] = is_nan ? 0x7fff : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
                }
            }
        }
    });
    return answer == CUDA_SUCCESS ? BLAS_OK : BLAS_FAILED;
}

}
