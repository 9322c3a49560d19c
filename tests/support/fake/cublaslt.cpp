// SPDX-License-Identifier: BSL-1.0
// Of cuBLASLt what the trainer uses, over the host's memory: batches of strided matrices, column by column. It computes in double, and
// refuses what the real one would.
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "fake.hpp"

namespace {

struct Description {
    cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr;
};

double number(const void* data, cudaDataType_t type, std::int64_t at) {
    if (type == CUDA_R_16BF) return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]));
    return static_cast<double>(static_cast<const float*>(data)[at]);
}
void write_number(void* data, cudaDataType_t type, std::int64_t at, double value) {
    if (type == CUDA_R_16BF) static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(static_cast<float>(value));
    else static_cast<float*>(data)[at] = static_cast<float>(value);
}

struct Layout {
    cudaDataType_t type;
    std::uint64_t rows, columns;
    std::int64_t leading;
    std::int32_t batch = 1;
    std::int64_t stride = 0;

    std::int64_t place(std::int32_t which, std::uint64_t row, std::uint64_t column) const {
        return which * stride + static_cast<std::int64_t>(column) * leading + static_cast<std::int64_t>(row);
    }
    double element(const void* data, std::int32_t which, std::uint64_t row, std::uint64_t column) const {
        return number(data, type, place(which, row, column));
    }
};

Description& own(cublasLtMatmulDesc_t handle) { return *reinterpret_cast<Description*>(handle); }
Layout& own(cublasLtMatrixLayout_t handle) { return *reinterpret_cast<Layout*>(handle); }

/// Do the shapes fit, as the real one would find before it starts?
bool fits(const Description& d, const Layout& a, const Layout& b, const Layout& c) {
    const auto rows = [](const Layout& l, cublasOperation_t op) { return op == CUBLAS_OP_N ? l.rows : l.columns; };
    const auto columns = [](const Layout& l, cublasOperation_t op) { return op == CUBLAS_OP_N ? l.columns : l.rows; };
    const auto lies = [](const Layout& l) { return l.leading >= static_cast<std::int64_t>(l.rows) && l.rows > 0 && l.columns > 0; };
    return a.type == b.type && (c.type == CUDA_R_32F || c.type == a.type) && a.batch == b.batch && b.batch == c.batch &&
           rows(a, d.a) == c.rows && columns(b, d.b) == c.columns && columns(a, d.a) == rows(b, d.b) && lies(a) && lies(b) && lies(c);
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    return *handle = reinterpret_cast<cublasLtHandle_t>(new int), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return delete reinterpret_cast<int*>(handle), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* handle, cublasComputeType_t compute, cudaDataType_t scale) {
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *handle = reinterpret_cast<cublasLtMatmulDesc_t>(new Description);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) { return delete &own(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t size) {
    Description& d = own(handle);
    const auto take = [&](auto& to) {
        if (size != sizeof to) return CUBLAS_STATUS_INVALID_VALUE;
        std::memcpy(&to, value, size);
        return CUBLAS_STATUS_SUCCESS;
    };
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return take(d.a);
        case CUBLASLT_MATMUL_DESC_TRANSB: return take(d.b);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return take(d.bias);
        case CUBLASLT_MATMUL_DESC_EPILOGUE:
            if (const auto status = take(d.epilogue); status != CUBLAS_STATUS_SUCCESS) return status;
            return d.epilogue == CUBLASLT_EPILOGUE_BIAS ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* handle, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t leading) {
    *handle = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, leading});
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) { return delete &own(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle, cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t size) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && size == sizeof(std::int32_t))
        own(handle).batch = *static_cast<const std::int32_t*>(value);
    else if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && size == sizeof(std::int64_t))
        own(handle).stride = *static_cast<const std::int64_t*>(value);
    else return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* handle) {
    return *handle = reinterpret_cast<cublasLtMatmulPreference_t>(new int), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
    return delete reinterpret_cast<int*>(handle), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t attribute, const void*,
                                                    size_t size) {
    return size == (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t*, int* found) {
    *found = fits(own(description), own(a), own(b), own(c)) ? 1 : 0;
    return *found != 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void* alpha, const void* a_data,
                              cublasLtMatrixLayout_t a_layout, const void* b_data, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* addend, cublasLtMatrixLayout_t addend_layout, void* data, cublasLtMatrixLayout_t layout,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
    const Description d = own(description);
    const Layout a = own(a_layout), b = own(b_layout), c = own(layout);
    const bool biased = d.epilogue == CUBLASLT_EPILOGUE_BIAS;
    const float kept = *static_cast<const float*>(beta);
    for (const void* pointer : {a_data, b_data, static_cast<const void*>(data), addend, biased ? d.bias : nullptr})
        if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return CUBLAS_STATUS_INVALID_VALUE;  // what was asked for
    if (!fits(d, a, b, c) || addend_layout != layout || (biased && d.bias == nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
    if (*static_cast<const float*>(alpha) != 1 || (kept != 0 && kept != 1)) return CUBLAS_STATUS_INVALID_VALUE;
    gradsync_fake::enqueue(stream, [=] {
        const std::uint64_t depth = d.a == CUBLAS_OP_N ? a.columns : a.rows;
        for (std::int32_t which = 0; which < c.batch; ++which) {
            for (std::uint64_t column = 0; column < c.columns; ++column) {
                for (std::uint64_t row = 0; row < c.rows; ++row) {
                    double sum = 0;
                    for (std::uint64_t k = 0; k < depth; ++k) {
                        const double x = d.a == CUBLAS_OP_N ? a.element(a_data, which, row, k) : a.element(a_data, which, k, row);
                        const double y = d.b == CUBLAS_OP_N ? b.element(b_data, which, k, column) : b.element(b_data, which, column, k);
                        sum += x * y;
                    }
                    if (kept == 1) sum += c.element(addend, which, row, column);
                    if (biased) sum += number(d.bias, c.type, static_cast<std::int64_t>(row));
                    write_number(data, c.type, c.place(which, row, column), sum);
                }
            }
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
