// SPDX-License-Identifier: BSL-1.0
#pragma once
// An n-gram language model: the embeddings of the last n bytes side by side, hidden layers with GELU, a softmax over
// the next byte.

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "batch.hpp"
#include "gradient_store.hpp"
#include "ops.hpp"
#include "parameters.hpp"
#include "unit_access.hpp"
#include "workspace.hpp"

namespace gradsync_train {

struct MlpConfig {
    std::size_t context = 16;    // n
    std::size_t embedding = 32;  // numbers a byte
    std::vector<std::size_t> hidden{512, 512};
    std::size_t sequences = 64;  // most rows in one call
    std::uint64_t seed = 0;

    Reading reading() const { return {context, 1, 1}; }

    /// Models with one description have the same parameters.
    std::string description() const {
        std::string text = "mlp context=" + std::to_string(context) + " d-model=" + std::to_string(embedding) + " hidden=";
        for (std::size_t width : hidden) text += (text.back() == '=' ? "" : ",") + std::to_string(width);
        return text;
    }
};

template <class Ops>
class Mlp {
public:
    using Operations = Ops;
    using Config = MlpConfig;
    static constexpr std::size_t classes = 256;

    explicit Mlp(const Config& config, Ops ops = {})
        : ops_{ops},
          config_{config},
          parameters_{config.seed},
          workspace_{ops},
          inputs_{ops.bytes(config.sequences * config.context)},
          targets_{ops.bytes(config.sequences)} {
        widths_ = {config.context * config.embedding};
        widths_.insert(widths_.end(), config.hidden.begin(), config.hidden.end());
        widths_.push_back(classes);

        embedding_ = parameters_.add("embedding.weight", {classes, config.embedding}, 1.0);
        for (std::size_t i = 0; i + 1 < widths_.size(); ++i) {
            const std::size_t in = widths_[i], out = widths_[i + 1];
            const std::string layer = "layers." + std::to_string(i);
            const double gain = i + 2 < widths_.size() ? 2.0 : 0.1;  // a timid last layer: the first guess is near uniform
            weights_.push_back(parameters_.add(layer + ".weight", {out, in}, std::sqrt(gain / static_cast<double>(in))));
            biases_.push_back(parameters_.add_constant(layer + ".bias", {out}, 0.0f));
        }
        for (std::size_t i = 0; i + 1 < widths_.size(); ++i) {
            before_.push_back(workspace_.factors(i == 0 ? 0 : config.sequences * widths_[i]));
            after_.push_back(workspace_.factors(config.sequences * widths_[i]));
            gradient_.push_back(workspace_.factors(config.sequences * widths_[i]));
        }
        scores_ = workspace_.floats(config.sequences * classes);
        dscores_ = workspace_.rounding(config.sequences * classes);
        factors_ = WeightFactors<Ops>(parameters_);
    }

    const Config& config() const { return config_; }
    Ops operations() const { return ops_; }
    Parameters& parameters() { return parameters_; }
    std::size_t activation_bytes() const { return workspace_.bytes(); }
    /// Returns the bytes of rounded copies of weights.
    std::size_t weight_bytes() const { return workspace_.weight_bytes(); }

    /// The embedding, and each layer.
    Units units() const {
        Units units{{embedding_}};
        for (std::size_t i = 0; i < weights_.size(); ++i) units.push_back({weights_[i], biases_[i]});
        return units;
    }
    /// Who is told which of them is in use. Outlives its last pass.
    void set_access(UnitAccess* access) {
        access_ = access;
        factors_.set_stay(access->weights_stay());
    }

    /// Mean loss in nats a byte; leaves what `backward` needs.
    typename Ops::Loss forward(const Batch& batch) {
        float* scores = logits(batch.sequences, config_.context, batch.inputs);
        return ops_.cross_entropy(batch.sequences, classes, ops_.load(batch.targets, targets_), scores, dscores_);
    }

    /// The scores of the byte after each sequence: [sequences, 256].
    float* logits(std::size_t sequences, std::size_t, std::span<const std::uint8_t> bytes) {
        {
            const UnitUse use{access_, 0};
            ops_.embed(sequences * config_.context, config_.context, config_.embedding, ops_.load(bytes, inputs_),
                       parameters_.value(embedding_), nullptr, after_[0].data());
        }
        for (std::size_t i = 0; i < weights_.size(); ++i) {
            const UnitUse use{access_, 1 + i};
            const std::size_t in = widths_[i], out = widths_[i + 1];
            const float* const bias = parameters_.value(biases_[i]);
            const auto* const weight = factors_.round(workspace_, parameters_, weights_[i]);
            if (i + 1 == weights_.size()) {
                ops_.linear(sequences, in, out, after_[i].data(), weight, bias, nullptr, scores_.data());
            } else {
                ops_.linear(sequences, in, out, after_[i].data(), weight, nullptr, nullptr, before_[i + 1].data());
                ops_.bias_gelu(sequences, out, bias, before_[i + 1].data(), after_[i + 1].data());
            }
        }
        return scores_.data();
    }

    void backward(const Batch& batch, GradientStore& gradients) {
        const std::size_t n = batch.sequences;
        for (std::size_t i = weights_.size(); i-- > 0;) {
            const UnitUse use{access_, 1 + i};
            const std::size_t in = widths_[i], out = widths_[i + 1];
            const typename Ops::Factor* dy = nullptr;
            if (i + 1 == weights_.size()) {  // cross_entropy left the gradient of the scores in their place
                ops_.column_sum(n, out, scores_.data(), gradients.gradient(biases_[i]));
                dy = ops_.rounded(scores_.data(), dscores_);
            } else {
                dy = gradient_[i + 1].data();
                ops_.bias_gelu_backward(n, out, parameters_.value(biases_[i]), before_[i + 1].data(), gradient_[i + 1].data(),
                                        gradients.gradient(biases_[i]));
            }
            gradients.ready(biases_[i]);
            ops_.linear_weight_gradient(n, in, out, dy, after_[i].data(), gradients.gradient(weights_[i]));
            gradients.ready(weights_[i]);
            ops_.linear_input_gradient(n, in, out, dy, factors_.rounded(workspace_, parameters_, weights_[i]), gradient_[i].data());
        }
        // The embedding's gradient does not depend on its weights.
        ops_.fill(classes * config_.embedding, 0.0f, gradients.gradient(embedding_));
        ops_.embed_backward_add(n * config_.context, config_.embedding, ops_.loaded(batch.inputs, inputs_), gradient_[0].data(),
                                gradients.gradient(embedding_));
        gradients.ready(embedding_);
    }

private:
    Ops ops_;
    Config config_;
    Parameters parameters_;
    UnitAccess* access_ = nullptr;
    Workspace<Ops> workspace_;
    typename Ops::Bytes inputs_, targets_;
    std::vector<std::size_t> widths_;  // of the layers' inputs, and of the scores
    std::size_t embedding_;
    std::vector<std::size_t> weights_, biases_;
    // By width: before and after GELU, and the gradient of the latter.
    std::vector<typename Ops::Factors> before_, after_, gradient_;
    typename Ops::Factors dscores_;
    WeightFactors<Ops> factors_;
    typename Ops::Floats scores_;
};

}  // namespace gradsync_train
