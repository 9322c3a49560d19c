#pragma once
// Matrix products on a device, by cuBLASLt.

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>

#include <gradsync/cuda/runtime.hpp>

namespace gradsync_train {

/// A row-major matrix as it lies in memory, and whether its transpose is meant. `stride`: from one of a batch to the next.
struct Matrix {
    const void* data;
    std::size_t leading;  // elements from one row to the next
    bool transposed = false;
    std::size_t stride = 0;
};

/// The products of one rank, for one thread at a time. Each shape is planned once: the same shape is computed in the same
/// order every time.
class Matmul {
public:
    Matmul();
    ~Matmul();
    Matmul(const Matmul&) = delete;
    Matmul& operator=(const Matmul&) = delete;

    struct Shape {
        std::size_t m, n, k;
        std::size_t batch = 1;
    };
    /// c[m, n] = a[m, k] b[k, n], for each of the batch; a and b of `type`, f32 or bf16, c of f32, and so are the sums:
    /// f32 is never rounded to less on the way. Pointers are aligned to 16 bytes. Throws gradsync::Error.
    void operator()(cudaDataType_t type, Shape shape, Matrix a, Matrix b, float* c, std::size_t leading, std::size_t stride,
                    cudaStream_t stream);

private:
    struct Plan;
    using Key = std::array<std::size_t, 13>;

    const Plan& plan_for(const Key& key);

    cublasLtHandle_t handle_ = nullptr;
    gradsync::cuda::DeviceMemory workspace_;
    std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace gradsync_train
