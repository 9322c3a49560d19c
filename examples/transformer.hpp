// SPDX-License-Identifier: BSL-1.0
#pragma once
// A decoder-only transformer over bytes: pre-norm blocks, causal attention, GELU, learned positions.

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

struct TransformerConfig {
    std::size_t width = 256;
    std::size_t blocks = 4;
    std::size_t heads = 4;
    std::size_t context = 128;
    std::size_t sequences = 8;  // most sequences in one call
    bool tied = false;          // the output layer is the embedding table
    bool recompute = false;     // keep the blocks' inputs only; the backward pass repeats each block's forward pass
    std::uint64_t seed = 0;

    Reading reading() const { return {context, context, context}; }

    /// Models with one description have the same parameters.
    std::string description() const {
        return "transformer context=" + std::to_string(context) + " d-model=" + std::to_string(width) +
               " blocks=" + std::to_string(blocks) + " heads=" + std::to_string(heads) + (tied ? " tied" : "");
    }
};

template <class Ops>
class Transformer {
public:
    using Operations = Ops;
    using Config = TransformerConfig;
    static constexpr std::size_t classes = 256;

    explicit Transformer(const Config& config, Ops ops = {})
        : ops_{ops},
          config_{config},
          parameters_{config.seed},
          workspace_{ops},
          inputs_{ops.bytes(config.sequences * config.context)},
          targets_{ops.bytes(config.sequences * config.context)},
          hidden_{4 * config.width} {
        const std::size_t d = config.width;
        // Each block adds twice to the residual stream: smaller steps keep its variance near one at any depth.
        const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(config.blocks));
        table_ = parameters_.add("embedding.weight", {classes, d}, 0.02, config.tied ? 2 : 1);
        positions_ = parameters_.add("positions.weight", {config.context, d}, 0.02);
        for (std::size_t i = 0; i < config.blocks; ++i) {
            const std::string name = "blocks." + std::to_string(i);
            Block b;
            b.norm1 = add_norm(name + ".norm1");
            b.qkv = add_linear(name + ".attention.qkv", d, 3 * d, 0.02);
            b.projection = add_linear(name + ".attention.projection", d, d, residual);
            b.norm2 = add_norm(name + ".norm2");
            b.expand = add_linear(name + ".mlp.expand", d, hidden_, 0.02);
            b.contract = add_linear(name + ".mlp.contract", hidden_, d, residual);
            blocks_.push_back(b);
        }
        norm_ = add_norm("norm");
        output_ = config.tied ? table_ : parameters_.add("output.weight", {classes, d}, 0.02);

        const std::size_t tokens = config.sequences * config.context;
        for (std::size_t i = 0; i <= config.blocks; ++i) stream_.push_back(workspace_.floats(tokens * d));
        for (std::size_t i = 0; i < (config.recompute ? 1 : config.blocks); ++i) {
            activations_.emplace_back(workspace_, tokens, d, hidden_, ops.attention_memory(shape(config.sequences, config.context)));
        }
        normalised_ = workspace_.factors(tokens * d);
        mean_ = workspace_.floats(tokens);
        inverse_ = workspace_.floats(tokens);
        logits_ = workspace_.floats(tokens * classes);
        dstream_ = workspace_.floats(tokens * d);
        dbranch_ = workspace_.factors(tokens * d);
        dwide_ = workspace_.factors(tokens * hidden_);
        dlogits_ = workspace_.rounding(tokens * classes);
        dstream_factors_ = workspace_.rounding(tokens * d);
        dstream_sums_ = workspace_.floats(d);
        weights_ = WeightFactors<Ops>(parameters_);
        scratch_ = workspace_.floats(ops.attention_scratch(shape(config.sequences, config.context)));
    }

    const Config& config() const { return config_; }
    Ops operations() const { return ops_; }
    Parameters& parameters() { return parameters_; }
    std::size_t activation_bytes() const { return workspace_.bytes(); }
    /// Returns the bytes of rounded copies of weights.
    std::size_t weight_bytes() const { return workspace_.weight_bytes(); }

    /// Embedding and positions, each block, the last norm and the output.
    Units units() const {
        Units units{{table_, positions_}};
        for (const Block& b : blocks_) {
            auto& unit = units.emplace_back();
            for (Layer layer : {b.norm1, b.qkv, b.projection, b.norm2, b.expand, b.contract}) {
                unit.push_back(layer.weight);
                unit.push_back(layer.bias);
            }
        }
        units.push_back({norm_.weight, norm_.bias, output_});
        return units;
    }
    /// Who is told which of them is in use. Outlives its last pass.
    void set_access(UnitAccess* access) {
        access_ = access;
        weights_.set_stay(access->weights_stay());
    }

    /// Mean loss in nats a byte; leaves what `backward` needs.
    typename Ops::Loss forward(const Batch& batch) {
        float* scores = logits(batch.sequences, batch.length, batch.inputs);
        return ops_.cross_entropy(batch.sequences * batch.length, classes, ops_.load(batch.targets, targets_), scores, dlogits_);
    }

    /// The scores of the byte after each prefix: [sequences, length, 256], for any length up to the context.
    float* logits(std::size_t sequences, std::size_t length, std::span<const std::uint8_t> bytes) {
        const std::size_t tokens = sequences * length, d = config_.width;
        {
            const UnitUse use{access_, 0};
            ops_.embed(tokens, length, d, ops_.load(bytes, inputs_), parameters_.value(table_), parameters_.value(positions_),
                       stream_[0].data());
        }
        for (std::size_t i = 0; i < blocks_.size(); ++i) {
            const UnitUse use{access_, unit_of_block(i)};
            block_forward(i, sequences, length);
        }
        const UnitUse use{access_, last_unit()};
        ops_.layer_norm(tokens, d, stream_.back().data(), gain(norm_), bias(norm_), normalised_.data(), mean_.data(), inverse_.data());
        ops_.linear(tokens, d, classes, normalised_.data(), weights_.round(workspace_, parameters_, output_), nullptr, nullptr,
                    logits_.data());
        return logits_.data();
    }

    void backward(const Batch& batch, GradientStore& gradients) {
        const std::size_t tokens = batch.sequences * batch.length, d = config_.width;
        {
            const UnitUse use{access_, last_unit()};
            const Factor* const dlogits = ops_.rounded(logits_.data(), dlogits_);
            ops_.linear_weight_gradient(tokens, d, classes, dlogits, normalised_.data(), gradients.gradient(output_));
            gradients.ready(output_);
            ops_.linear_input_gradient(tokens, d, classes, dlogits, weights_.rounded(workspace_, parameters_, output_), dbranch_.data());
            ops_.fill(tokens * d, 0.0f, dstream_.data());
            norm_backward(norm_, tokens, stream_.back().data(), mean_.data(), inverse_.data(), gradients);
        }

        for (std::size_t i = blocks_.size(); i-- > 0;) {
            const UnitUse use{access_, unit_of_block(i)};
            // The last block's activations are still there, recomputing or not.
            if (config_.recompute && i + 1 < blocks_.size()) block_forward(i, batch.sequences, batch.length);
            block_backward(i, batch.sequences, batch.length, gradients);
        }

        // The embedding's gradients do not depend on its weights.
        ops_.positions_backward(tokens, batch.length, d, dstream_.data(), gradients.gradient(positions_));
        gradients.ready(positions_);
        if (!config_.tied) ops_.fill(classes * d, 0.0f, gradients.gradient(table_));
        ops_.embed_backward_add(tokens, d, ops_.loaded(batch.inputs, inputs_), ops_.rounded(dstream_.data(), dstream_factors_),
                                gradients.gradient(table_));
        gradients.ready(table_);
    }

private:
    using Floats = typename Ops::Floats;
    using Factor = typename Ops::Factor;
    using Factors = typename Ops::Factors;

    /// Two parameters that belong together: a weight (or gain) and its bias.
    struct Layer {
        std::size_t weight;
        std::size_t bias;
    };

    struct Block {
        Layer norm1, qkv, projection, norm2, expand, contract;
    };

    /// What one block's backward pass needs of its forward pass.
    struct Activations {
        Activations(Workspace<Ops>& memory, std::size_t tokens, std::size_t width, std::size_t hidden, std::size_t attention_memory)
            : normalised1(memory.factors(tokens * width)),
              mean1(memory.floats(tokens)),
              inverse1(memory.floats(tokens)),
              qkv(memory.factors(tokens * 3 * width)),
              attention(memory.floats(attention_memory)),
              attended(memory.factors(tokens * width)),
              middle(memory.floats(tokens * width)),
              normalised2(memory.factors(tokens * width)),
              mean2(memory.floats(tokens)),
              inverse2(memory.floats(tokens)),
              expanded(memory.factors(tokens * hidden)),
              activated(memory.factors(tokens * hidden)) {}

        Factors normalised1;
        Floats mean1, inverse1;
        Factors qkv;
        Floats attention;
        Factors attended;
        Floats middle;  // the residual stream between attention and MLP
        Factors normalised2;
        Floats mean2, inverse2;
        Factors expanded, activated;
    };

    static std::size_t unit_of_block(std::size_t i) { return 1 + i; }
    std::size_t last_unit() const { return 1 + blocks_.size(); }

    Layer add_linear(const std::string& name, std::size_t in, std::size_t out, double deviation) {
        const std::size_t weight = parameters_.add(name + ".weight", {out, in}, deviation);
        return {weight, parameters_.add_constant(name + ".bias", {out}, 0.0f)};
    }

    Layer add_norm(const std::string& name) {
        const std::size_t weight = parameters_.add_constant(name + ".weight", {config_.width}, 1.0f);
        return {weight, parameters_.add_constant(name + ".bias", {config_.width}, 0.0f)};
    }

    const float* gain(Layer layer) const { return parameters_.value(layer.weight); }
    const float* bias(Layer layer) const { return parameters_.value(layer.bias); }
    const Factor* weight(Layer layer) { return weights_.round(workspace_, parameters_, layer.weight); }

    AttentionShape shape(std::size_t sequences, std::size_t length) const {
        return {sequences, length, config_.heads, config_.width / config_.heads};
    }

    Activations& activations(std::size_t block) { return activations_[config_.recompute ? 0 : block]; }

    void block_forward(std::size_t i, std::size_t sequences, std::size_t length) {
        const Block& b = blocks_[i];
        Activations& a = activations(i);
        const std::size_t tokens = sequences * length, d = config_.width;
        const float* x = stream_[i].data();
        float* y = stream_[i + 1].data();

        ops_.layer_norm(tokens, d, x, gain(b.norm1), bias(b.norm1), a.normalised1.data(), a.mean1.data(), a.inverse1.data());
        ops_.linear(tokens, d, 3 * d, a.normalised1.data(), weight(b.qkv), bias(b.qkv), nullptr, a.qkv.data());
        ops_.attention(shape(sequences, length), a.qkv.data(), a.attention.data(), a.attended.data());
        ops_.linear(tokens, d, d, a.attended.data(), weight(b.projection), bias(b.projection), x, a.middle.data());

        ops_.layer_norm(tokens, d, a.middle.data(), gain(b.norm2), bias(b.norm2), a.normalised2.data(), a.mean2.data(), a.inverse2.data());
        ops_.linear(tokens, d, hidden_, a.normalised2.data(), weight(b.expand), nullptr, nullptr, a.expanded.data());
        ops_.bias_gelu(tokens, hidden_, bias(b.expand), a.expanded.data(), a.activated.data());
        ops_.linear(tokens, hidden_, d, a.activated.data(), weight(b.contract), bias(b.contract), a.middle.data(), y);
    }

    /// dstream_ holds the gradient of the block's output, and afterwards of its input.
    void block_backward(std::size_t i, std::size_t sequences, std::size_t length, GradientStore& gradients) {
        const Block& b = blocks_[i];
        Activations& a = activations(i);
        const std::size_t tokens = sequences * length, d = config_.width;

        stream_backward(b.contract, tokens, hidden_, a.activated.data(), dwide_.data(), gradients);
        ops_.bias_gelu_backward(tokens, hidden_, bias(b.expand), a.expanded.data(), dwide_.data(), gradients.gradient(b.expand.bias));
        gradients.ready(b.expand.bias);
        weight_backward(b.expand, tokens, d, hidden_, dwide_.data(), a.normalised2.data(), dbranch_.data(), gradients);
        norm_backward(b.norm2, tokens, a.middle.data(), a.mean2.data(), a.inverse2.data(), gradients);

        stream_backward(b.projection, tokens, d, a.attended.data(), dbranch_.data(), gradients);
        ops_.attention_backward(shape(sequences, length), a.qkv.data(), a.attention.data(), a.attended.data(), dbranch_.data(),
                                dwide_.data(), gradients.gradient(b.qkv.bias), scratch_.data());
        gradients.ready(b.qkv.bias);
        weight_backward(b.qkv, tokens, d, 3 * d, dwide_.data(), a.normalised1.data(), dbranch_.data(), gradients);
        norm_backward(b.norm1, tokens, stream_[i].data(), a.mean1.data(), a.inverse1.data(), gradients);
    }

    /// For a layer that adds to the residual stream.
    void stream_backward(Layer layer, std::size_t n, std::size_t in, const Factor* x, Factor* dx, GradientStore& gradients) {
        ops_.column_sum(1, config_.width, dstream_sums_.data(), gradients.gradient(layer.bias));
        gradients.ready(layer.bias);
        weight_backward(layer, n, in, config_.width, ops_.rounded(dstream_.data(), dstream_factors_), x, dx, gradients);
    }

    void weight_backward(Layer layer, std::size_t n, std::size_t in, std::size_t out, const Factor* dy, const Factor* x, Factor* dx,
                         GradientStore& gradients) {
        ops_.linear_weight_gradient(n, in, out, dy, x, gradients.gradient(layer.weight));
        gradients.ready(layer.weight);
        ops_.linear_input_gradient(n, in, out, dy, weights_.rounded(workspace_, parameters_, layer.weight), dx);
    }

    /// From dbranch_, the gradient of the norm's output, to dstream_, that of its input, with its factors and the sum of its rows.
    void norm_backward(Layer layer, std::size_t tokens, const float* x, const float* mean, const float* inverse, GradientStore& gradients) {
        ops_.layer_norm_backward_add(tokens, config_.width, x, gain(layer), mean, inverse, dbranch_.data(), dstream_.data(),
                                     dstream_factors_, gradients.gradient(layer.weight), gradients.gradient(layer.bias),
                                     dstream_sums_.data());
        gradients.ready(layer.bias);
        gradients.ready(layer.weight);
    }

    Ops ops_;
    Config config_;
    Parameters parameters_;
    UnitAccess* access_ = nullptr;
    Workspace<Ops> workspace_;
    typename Ops::Bytes inputs_, targets_;
    std::size_t hidden_;
    std::size_t table_, positions_, output_;
    std::vector<Block> blocks_;
    Layer norm_;

    std::vector<Floats> stream_;            // the residual stream before each block, and after the last
    std::vector<Activations> activations_;  // one a block; a single one when recomputing
    Factors normalised_;
    Floats mean_, inverse_, logits_;
    Floats dstream_, dstream_sums_, scratch_;
    Factors dbranch_, dwide_, dlogits_, dstream_factors_;
    WeightFactors<Ops> weights_;
};

}  // namespace gradsync_train
