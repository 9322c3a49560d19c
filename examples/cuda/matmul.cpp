// SPDX-License-Identifier: BSL-1.0
#include "matmul.hpp"

#include <string>

#include <gradsync/core/error.hpp>
#include <gradsync/core/unique_handle.hpp>

namespace gradsync_train {

namespace {

namespace gs = gradsync;

void check(cublasStatus_t status, const char* call) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw gs::Error(gs::Errc::device_failed, std::string(call) + ": cuBLAS status " + std::to_string(static_cast<int>(status)),
                    {.operation = call});
}

using Descriptor = gs::UniqueHandle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = gs::UniqueHandle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = gs::UniqueHandle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// Of a row-major matrix [rows, columns], which to cuBLASLt is the transpose, column by column.
Layout make_layout(cudaDataType_t type, std::size_t rows, std::size_t columns, std::size_t leading, std::size_t batch, std::size_t stride) {
    cublasLtMatrixLayout_t handle = nullptr;
    check(cublasLtMatrixLayoutCreate(&handle, type, columns, rows, static_cast<std::int64_t>(leading)), "cublasLtMatrixLayoutCreate");
    Layout layout(handle);
    const auto count = static_cast<std::int32_t>(batch);
    const auto offset = static_cast<std::int64_t>(stride);
    check(cublasLtMatrixLayoutSetAttribute(handle, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
          "cublasLtMatrixLayoutSetAttribute");
    check(cublasLtMatrixLayoutSetAttribute(handle, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset, sizeof offset),
          "cublasLtMatrixLayoutSetAttribute");
    return layout;
}

constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

}  // namespace

struct Matmul::Plan {
    Descriptor descriptor;
    Layout a, b, c;
    cublasLtMatmulAlgo_t algorithm;
};

Matmul::Matmul() : workspace_(workspace_bytes, false) { check(cublasLtCreate(&handle_), "cublasLtCreate"); }
Matmul::~Matmul() {
    plans_.clear();
    cublasLtDestroy(handle_);
}

const Matmul::Plan& Matmul::plan_for(const Key& key) {
    std::unique_ptr<Plan>& plan = plans_[key];
    if (plan) return *plan;
    const auto [type_number, m, n, k, batch, a_leading, a_transposed, a_stride, b_leading, b_transposed, b_stride, c_type, c_leading,
                c_stride, biased] = key;
    const auto type = static_cast<cudaDataType_t>(type_number);

    auto made = std::make_unique<Plan>();
    cublasLtMatmulDesc_t descriptor = nullptr;
    check(cublasLtMatmulDescCreate(&descriptor, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    made->descriptor = Descriptor(descriptor);
    // It computes c^T = b^T a^T, all column by column: what we call b comes first.
    const auto transpose = [&](cublasLtMatmulDescAttributes_t attribute, bool transposed) {
        const cublasOperation_t operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
        check(cublasLtMatmulDescSetAttribute(descriptor, attribute, &operation, sizeof operation), "cublasLtMatmulDescSetAttribute");
    };
    transpose(CUBLASLT_MATMUL_DESC_TRANSA, b_transposed != 0);
    transpose(CUBLASLT_MATMUL_DESC_TRANSB, a_transposed != 0);
    if (biased != 0) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        check(cublasLtMatmulDescSetAttribute(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
              "cublasLtMatmulDescSetAttribute");
    }
    made->a = a_transposed != 0 ? make_layout(type, k, m, a_leading, batch, a_stride) : make_layout(type, m, k, a_leading, batch, a_stride);
    made->b = b_transposed != 0 ? make_layout(type, n, k, b_leading, batch, b_stride) : make_layout(type, k, n, b_leading, batch, b_stride);
    made->c = make_layout(static_cast<cudaDataType_t>(c_type), m, n, c_leading, batch, c_stride);

    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const Preference preference_owner(preference);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    const std::uint32_t alignment = 16;  // gradients lie in buckets
    for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        prefer(attribute, alignment);

    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle_, descriptor, made->b.get(), made->a.get(), made->c.get(), made->c.get(), preference, 1,
                                         &best, &found),
          "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0) check(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic");
    made->algorithm = best.algo;
    plan = std::move(made);
    return *plan;
}

void Matmul::operator()(cudaDataType_t type, Shape shape, Matrix a, Matrix b, const Product& c, cudaStream_t stream) {
    const Plan& plan =
        plan_for({static_cast<std::size_t>(type), shape.m, shape.n, shape.k, shape.batch, a.leading, a.transposed, a.stride, b.leading,
                  b.transposed, b.stride, static_cast<std::size_t>(c.type), c.leading, c.stride, c.bias != nullptr});
    if (c.bias != nullptr)
        check(cublasLtMatmulDescSetAttribute(plan.descriptor.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &c.bias, sizeof c.bias),
              "cublasLtMatmulDescSetAttribute");
    const float one = 1, kept = c.addend != nullptr ? 1 : 0;
    check(cublasLtMatmul(handle_, plan.descriptor.get(), &one, b.data, plan.b.get(), a.data, plan.a.get(), &kept,
                         c.addend != nullptr ? c.addend : c.data, plan.c.get(), c.data, plan.c.get(), &plan.algorithm, workspace_.data(),
                         workspace_bytes, stream),
          "cublasLtMatmul");
}

}  // namespace gradsync_train
