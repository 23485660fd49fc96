#include "step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "attention_amx.h"
#include "attention_packed.h"
#include "buffer.h"
#include "latent_attention.h"
#include "quantized_product.h"
#include "state_space.h"
#include "streams.h"

namespace trioserve {
namespace {

// Up to this many rows, every thread normalizes all rows for itself, which saves a meeting.
constexpr int64_t OWN_NORM_ROWS_MAX = 4;
constexpr int64_t ROWS_OF_PIECE = 4;

// gate / (1 + e ** -slope) with the precision of T. It is silu if the slope is the gate.
template <class T>
inline Lanes gated(Lanes gate, Lanes slope) {
    if constexpr (sizeof(T) == sizeof(float)) return div(gate, add(set(1.0f), exp(sub(zero(), slope))));
    const Lanes power = min(set(126.0f), mul(slope, set(-1.44269504f)));  // this order of arguments keeps NaN
    return div_roughly(gate, add(set(1.0f), power_of_two_roughly(power)));
}

template <class T>
inline Lanes activate(int32_t activation, Lanes gate) {
    if (activation == SILU) return gated<T>(gate, gate);
    const Lanes positive = max(zero(), gate);  // this order of arguments keeps NaN
    if (activation == RELU) return positive;
    if (activation == RELU2) return mul(positive, positive);
    if (activation == GELU) {
        // Half of x + |x| erf(|x| / sqrt(2)). Abramowitz and Stegun, 7.1.26: the error of erf is below 1.5e-7.
        const Lanes size = max(sub(zero(), gate), gate), t = div(set(1.0f), fma(size, set(0.23164189f), set(1.0f)));
        Lanes sum = set(1.061405429f);
        for (float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fma(sum, t, set(factor));
        const Lanes rest = mul(mul(sum, t), exp(mul(mul(gate, gate), set(-0.5f))));
        return mul(set(0.5f), fma(size, sub(set(1.0f), rest), gate));
    }
    const Lanes cube = mul(mul(gate, gate), gate);
    return gated<T>(gate, mul(set(1.59576912f), fma(cube, set(0.044715f), gate)));
}

// xIELU (arXiv 2411.13010).
struct Xielu {
    Lanes positive, negative, beta, eps;

    // weights: activation_weights of a layer, or null.
    explicit Xielu(const float* weights) {
        if (weights == nullptr) return;
        const auto softplus = [](float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); };
        positive = set(softplus(weights[0]));
        negative = set(weights[2] + softplus(weights[1]));
        beta = set(weights[2]);
        eps = set(weights[3]);
    }
    Lanes of(Lanes x) const {
        const Lanes below = sub(sub(exp(min(eps, x)), set(1.0f)), x);  // this order of arguments keeps NaN
        const Lanes curved = where_at_least(x, zero(), mul(mul(x, x), positive), mul(below, negative));
        return fma(beta, x, curved);
    }
};

// Multiplies the activation of the gate by up.
template <class T>
inline Lanes activate(int32_t activation, Lanes gate, Lanes up) {
    if (activation == CLAMPED_SWIGLU) {
        const Lanes limit = set(7.0f), below = min(limit, gate);  // this order of arguments keeps NaN
        up = max(sub(zero(), limit), min(limit, up));
        return mul(gated<T>(below, mul(set(1.702f), below)), add(up, set(1.0f)));
    }
    return mul(activate<T>(activation, gate), up);
}

// Finds the indexes of the `count` largest numbers, largest first, the lower index first among equals. Numbers for which
// skips(index) is true are left out.
template <class Skips>
void largest_of(const float* numbers, int32_t size, int32_t count, int32_t* places, const Skips& skips) {
    for (int32_t place = 0; place < count; place++) {
        int32_t best = -1;
        for (int32_t index = 0; index < size; index++) {
            if (skips(index) || std::find(places, places + place, index) != places + place) continue;
            if (best < 0 || numbers[index] > numbers[best]) best = index;  // a NaN spoils the row through its weight
        }
        places[place] = best;
    }
}

// Chooses experts one after the other (SparseMixer, arXiv 2409.12136). The weight of an expert is its share of a softmax over
// the experts that were not chosen before it and whose logits are near the largest one.
void choose_in_turn(const Experts& experts, const float* logits, int32_t* chosen, float* weights) {
    for (int32_t place = 0; place < experts.per_token; place++) {
        const auto skips = [&](int32_t expert) { return std::find(chosen, chosen + place, expert) != chosen + place; };
        largest_of(logits, experts.count, 1, chosen + place, skips);
        const float best = logits[chosen[place]];
        float total = 0;
        for (int32_t expert = 0; expert < experts.count; expert++) {
            const bool is_far = (best - logits[expert]) / std::max(std::fabs(logits[expert]), best) > experts.nearness;
            if (!is_far && !skips(expert)) total += std::exp(logits[expert] - best);
        }
        weights[place] = 1.0f / total;
    }
}

// Turns a row's products with the router into scores, and chooses the indexes and weights of its experts. ranks: memory for as
// many numbers as there are scores.
void choose_experts(const Experts& experts, float* scores, float* ranks, int32_t* chosen, float* weights) {
    const int32_t count = experts.count, groups = experts.group_count, size = count / groups;
    const float cap = experts.logit_cap;
    for (int32_t expert = 0; cap > 0 && expert < count; expert++) scores[expert] = cap * std::tanh(scores[expert] / cap);
    if (experts.scoring == SPARSEMIXER) return choose_in_turn(experts, scores, chosen, weights);
    if (experts.scoring == SOFTMAX) {
        const float most = *std::max_element(scores, scores + count);
        float total = 0;
        for (int32_t expert = 0; expert < count; expert++) total += scores[expert] = std::exp(scores[expert] - most);
        for (int32_t expert = 0; expert < count; expert++) scores[expert] /= total;
    } else {
        for (int32_t expert = 0; expert < count; expert++) scores[expert] = 1.0f / (1.0f + std::exp(-scores[expert]));
    }
    for (int32_t expert = 0; expert < count; expert++)
        ranks[expert] = scores[expert] + (experts.score_bias == nullptr ? 0.0f : experts.score_bias[expert]);
    bool is_open[EXPERT_GROUPS_MAX];
    std::fill(is_open, is_open + groups, experts.groups_per_token == groups);
    if (experts.groups_per_token < groups) {
        float group_ranks[EXPERT_GROUPS_MAX];
        int32_t leaders[EXPERT_GROUPS_MAX], best[EXPERT_GROUPS_MAX];
        const auto none = [](int32_t) { return false; };
        for (int32_t group = 0; group < groups; group++) {
            largest_of(ranks + group * size, size, experts.group_leaders, leaders, none);
            group_ranks[group] = 0;
            for (int32_t leader = 0; leader < experts.group_leaders; leader++)
                group_ranks[group] += ranks[group * size + leaders[leader]];
        }
        largest_of(group_ranks, groups, experts.groups_per_token, best, none);
        for (int32_t place = 0; place < experts.groups_per_token; place++) is_open[best[place]] = true;
    }
    largest_of(ranks, count, experts.per_token, chosen, [&](int32_t expert) { return !is_open[expert / size]; });
    float chosen_total = 1e-20f;  // above 0, because all sigmoids may be 0
    for (int32_t place = 0; place < experts.per_token; place++) chosen_total += weights[place] = scores[chosen[place]];
    for (int32_t place = 0; place < experts.per_token; place++)
        weights[place] = experts.scale * (experts.normalizes ? weights[place] / chosen_total : weights[place]);
    for (int32_t place = 0; experts.expert_scale != nullptr && place < experts.per_token; place++)
        weights[place] *= experts.expert_scale[chosen[place]];
}

// Number of intermediate channels of a matrix gate_up.
int64_t outputs_of(const Layer& layer, const Matrix& gate_up) {
    return gate_up.parts[0].block_count / (layer.has_gate ? 2 : 1) * LANES;
}

// True if the MLP's norm must be computed before attention adds its result to the hidden state.
bool has_own_mlp_norm(const Layer& layer) { return layer.is_parallel && layer.mlp_norm != nullptr; }

bool has_normed_experts(const Layer& layer) { return layer.experts != nullptr && layer.experts->router_norm != nullptr; }

bool has_layer(const Model& model, bool (*is_wanted)(const Layer&)) {
    return std::any_of(model.layers, model.layers + model.layer_count, is_wanted);
}

bool has_output_norm(const Layer& layer) {
    return layer.attention_output_norm != nullptr || layer.mlp_output_norm != nullptr;
}

AttentionShape shape_of(const Model& model, const Layer& layer) {
    AttentionShape shape{layer.head_count, layer.kv_head_count, layer.head_dim, model.page_tokens};
    shape.latent_dim = model.latent_dim;
    shape.kv_format = model.kv_format;
    shape.score_cap = layer.score_cap;
    shape.sinks = layer.sinks;
    shape.slopes = layer.slopes;
    shape.own_value_dim = layer.value_dim;
    return shape;
}

bool is_first_rank(const Model& model) { return model.collectives == nullptr || model.collectives->rank == 0; }

// Returns true if this rank samples a row whose logits are kept. The other ranks get the result from it.
bool is_own_row(const Model& model, int64_t row) {
    return model.collectives == nullptr || row % model.collectives->size == model.collectives->rank;
}

bool has_mlp(const Layer& layer) { return layer.experts != nullptr || layer.gate_up.parts[0].block_count > 0; }

// A layer without any matrix is one of run_attention, which computes only the attention.
bool attends(const Layer& layer) {
    return layer.qkv.parts[0].block_count > 0 || (layer.recurrent == nullptr && !has_mlp(layer));
}

// Limits queries, keys and values.
Lanes clipped(const Layer& layer, Lanes value) {
    if (layer.clip == 0) return value;
    return max(set(-layer.clip), min(set(layer.clip), value));  // this order of arguments keeps NaN
}

float scale_of(const Layer& layer) { return layer.scale == nullptr ? 1.0f : *layer.scale; }

// The first matrix of a layer's MLP or experts.
const Matrix& first_of_mlp(const Layer& layer) { return layer.experts == nullptr ? layer.gate_up : layer.experts->router; }

// The first matrix that multiplies a layer's rows.
const Matrix& first_matrix(const Layer& layer) {
    if (layer.recurrent != nullptr) return layer.recurrent->input;
    return attends(layer) ? layer.qkv : first_of_mlp(layer);
}

// Numbers per row that attention's first product computes.
int64_t qkv_size(const Layer& layer) {
    if (layer.latent != nullptr) return queries_size(*layer.latent, layer.head_count) + layer.head_dim;
    const int64_t value_dim = layer.value_dim > 0 ? layer.value_dim : layer.head_dim;
    return int64_t(layer.head_count) * layer.head_dim +
           (layer.shares_kv ? 0 : layer.kv_head_count * (layer.head_dim + value_dim));
}

// Numbers per row of the results of all heads.
int64_t attended_size(const AttentionShape& shape) { return shape.heads * shape.value_dim(); }

// Numbers per row of the product of attention_gate, in whole blocks.
int64_t gate_stride(const Layer& layer, const AttentionShape& shape) {
    return rounded_up(layer.gates_heads ? shape.heads : attended_size(shape), LANES);
}

// Sets gates below a cutoff to 0, and writes their activation times up to to(n).
template <class T, class To>
void cut_and_gate(int32_t activation, float cutoff, const float* gates, const float* ups, int64_t size, const To& to) {
    Lanes sum = zero(), squares = zero();
    for (int64_t n = 0; n < size; n += LANES) sum = add(sum, load(gates + n));
    const Lanes mean = set(sum_of(sum) / float(size));
    for (int64_t n = 0; n < size; n += LANES) {
        const Lanes part = sub(load(gates + n), mean);
        squares = fma(part, part, squares);
    }
    const Lanes least = add(mean, set(cutoff * std::sqrt(sum_of(squares) / float(size))));
    for (int64_t n = 0; n < size; n += LANES) {
        const Lanes gate = max(zero(), sub(load(gates + n), least));  // this order of arguments keeps NaN
        store(to(n), activate<T>(activation, gate, load(ups + n)));
    }
}

// Returns a callback that stores a product's sums as rows of `to`, `stride` numbers each.
auto kept_in(float* to, int64_t stride) {
    return [=](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
        for (int row = 0; row < count; row++)
            for (int block = 0; block < blocks; block++)
                store(to + (first_row + row) * stride + (first_block + block) * LANES, load(sums + row * PANEL + block * LANES));
    };
}

// Reads one row of a packed matrix.
template <class T>
void read_row(const WeightPart& part, int64_t row, float* to) {
    const int64_t size = part.inputs;
    if (part.format != DENSE) {
        dequantize_row(part.format, static_cast<const uint8_t*>(part.data), row, size, to);
        return;
    }
    constexpr int DEPTH = Unit<T>::DEPTH;
    const T* from = static_cast<const T*>(part.data) + row / LANES * LANES * padded_depth(size);
    for (int64_t n = 0; n < size; n++)
        to[n] = to_float(from[n / DEPTH * DEPTH * LANES + row % LANES * DEPTH + n % DEPTH]);
}

// The parts of one row's context. place: index of the first part's sums. first: index of the first part in the context. count:
// number of parts. writes: number of pieces that write the parts. position: position of the row in its chunk's sequence.
struct RowParts {
    int64_t place = 0, position = 0;
    int32_t first = 0, count = 0, writes = 0;
};

// A decode's row while rows with equal blocks are searched. pages_seen: number of pages that the row sees completely.
struct DecodeRow {
    const int32_t* table;
    int64_t pages_seen, shared_tokens;
    int32_t row, chunk;
};

int64_t common_pages(const DecodeRow& a, const DecodeRow& b) {
    const int64_t limit = std::min(a.pages_seen, b.pages_seen);
    return std::mismatch(a.table, a.table + limit, b.table).first - a.table;
}

// The range that rows see: a sliding window, or sections. 0 is none.
struct Reach {
    int64_t window, section;
};

// Layers with equal numbers divide attention into the same pieces: their reach, and their heads.
using PlanKey = std::array<int64_t, 6>;

PlanKey plan_key(const Layer& layer) {
    return {layer.window, layer.section, layer.head_count, layer.kv_head_count, layer.head_dim, layer.value_dim};
}

// How attention is divided into pieces, for one reach. chunks: the chunks of the step, or their parts in each section, which
// count as sequences that begin with the section.
struct AttentionPlan {
    std::vector<Chunk> chunks;
    std::vector<AttentionPiece> pieces;
    std::vector<int32_t> sharers;  // row indexes
    std::vector<RowParts> parts;  // for each row, without parts for rows of prompts
    int64_t part_count = 0;
};

}  // namespace

class Engine {
public:
    explicit Engine(int thread_count) : team(thread_count), own_(thread_count) {}

    template <class T>
    bool compute(const Model& model, const Step& step);
    template <class T>
    bool compute_logprobs(const Model& model, const float* hidden, int64_t rows, const int32_t* targets,
                          int32_t top_count, float* logprobs, int32_t* top_ids);
    void compute_sampling(const Step& step, int64_t vocab, const float* logits);

    template <class T>
    void compute_attention(const Model& model, const Step& step, const T* queries, T* attended);
    template <class T>
    void compute_product(const T* x, int64_t m, const Matrix& weight, int64_t n, float* y);

    // Valid until the next call. See Model.batch_invariant.
    void make_invariant(bool is_invariant) { is_invariant_ = is_invariant; }

private:
    struct Own {  // memory of one thread
        Buffer normed, quantized, dequantized, packed, floats, memory, table_row, vectors;
        Buffer best_values, best_ids, doubts, scores, weights, work, marks, allowed;
    };

    void plan_rows(const Model& model, const Step& step);
    AttentionPlan plan_attention(const AttentionShape& shape, const Reach& reach) const;
    void share(const AttentionShape& shape, DecodeRow* first, DecodeRow* end, int64_t from, AttentionPlan& plan) const;
    // Rows in the layout that a product of this many rows needs.
    template <class T>
    Rows<T> rows_for(T* memory, int64_t count, int64_t k) const {
        return {memory, padded_depth(k), uses_amx<T>(count, is_invariant_)};
    }
    template <class T>
    QuantizedRows quantize_rows(int thread, const Rows<const T>& x, int64_t rows, int64_t k);
    template <class T, class Finish>
    void product(int thread, const Rows<const T>& x, int64_t rows, const Matrix& weight, const void* next,
                 const Finish& finish);
    template <class T>
    const uint8_t* first_read(int thread, const Matrix& weight, int64_t rows) const;
    template <class T>
    void embed(int thread, const Model& model, const Step& step, float* hidden);
    template <class T>
    Rows<const T> norm_rows(int thread, const float* hidden, int64_t rows, int64_t size, const float* weight,
                            const Norm& norm, T* shared);
    void add_normed(int thread, float* product, int64_t rows, int64_t size, const float* weight, const Norm& norm,
                    float scale, float* hidden, float total_scale = 1.0f);
    template <class T>
    void gate(int thread, const Rows<const T>& x, int64_t rows, const Matrix& gate_up, const float* bias,
              const Layer& layer, const Rows<T>& activated, const void* next, int32_t adapted_layer);
    template <class T>
    void make_room_for_streams(const Model& model);
    float* stream_at(int64_t size, int64_t row, int stream) { return streams_.of<float>(0) + (stream * rows_ + row) * size; }
    template <class T>
    void begin_streams(int thread, const Model& model, const Step& step, const float* hidden, T* normed);
    void predict_streams(int thread, const Model& model, const Layer& layer, float* hidden);
    template <class T>
    void correct_streams(int thread, const Model& model, int32_t index, float* hidden, float* outputs, T* normed);
    template <class T>
    void end_streams(int thread, const Model& model, float* hidden, float* outputs, T* normed);
    template <class T>
    void make_laurel(int thread, const Laurel& laurel, const Rows<const T>& x, int64_t size);
    template <class T>
    void add_laurel(int thread, const Laurel& laurel, const Rows<const T>& x, int64_t size, const Norm& norm, float* hidden);
    template <class T>
    void mix(int thread, const Model& model, const Layer& layer, const Experts& experts, const float* hidden,
             const Rows<const T>& x, const float* base, float* to);
    void sort_by_expert(const Experts& experts);
    template <class T>
    void make_room_for_experts(const Model& model);
    float query_factor(const Layer& layer, int64_t row) const {
        return layer.has_temperature ? layer.query_factor * temperatures_[row] : layer.query_factor;
    }
    template <class T>
    T* query_at(const AttentionShape& shape, int64_t row, int64_t head, T* queries) const;
    template <class T>
    void turn_and_store(const Model& model, const Layer& layer, float* qkv, int64_t row, T* queries, T* pages);
    template <class T>
    void turn_and_store(const Model& model, const Layer& layer, const float* sums, int64_t first_row, int count,
                        int64_t first_block, int blocks, T* queries, T* pages);
    template <class T>
    void attend(int thread, const AttentionShape& shape, const AttentionPlan& plan, int64_t window, const T* queries,
                const T* pages, const HeadRows<T>& attended, const void* after);
    template <class T>
    void gate_attended(int thread, const Layer& layer, const AttentionShape& shape, const Rows<T>& attended);
    template <class T>
    void make_room_for_states(const Model& model);
    template <class T>
    void select(int thread, const Recurrent& layer, const Rows<const T>& x);
    template <class T>
    void raise_latents(int thread, const Recurrent& layer, int64_t first, const Matrix& weight, float* to, int64_t size);
    template <class T>
    void recur(int thread, const Step& step, const Recurrent& layer, float eps, float* memory, const Rows<T>& mixed);
    template <class T>
    HeadRows<T> head_rows(Buffer& memory, int64_t heads, int64_t dim) const;
    template <class T>
    HeadRows<T> attended_rows(const AttentionShape& shape);
    template <class T>
    void pad_attended(const AttentionShape& shape);
    template <class T>
    void make_room_for_latents(const Model& model);
    template <class T>
    void make_latents(int thread, const Model& model, const Layer& layer, const float* qkv, T* queries, T* pages);
    template <class T>
    Rows<const T> raise_values(int thread, const Model& model, const Layer& layer, const HeadRows<const T>& attended);
    template <class T>
    void choose(int thread, const Model& model, const Rows<const T>& normed, int64_t rows);
    // The largest logit of a row, the lowest token id that has it, and whether all logits are finite.
    struct Choice {
        float value;
        int32_t token, is_finite;

        void take(const Choice& other) {
            if (other.value > value || (other.value == value && other.token < token)) {
                value = other.value;
                token = other.token;
            }
            is_finite &= other.is_finite;
        }
    };
    void add_up_ranks(const Collectives& ranks, const float* part, int64_t count, bool is_abandoned, float* total);
    Choice own_choice(int64_t row);
    void prepare_choices(const Model& model, int64_t rows, int64_t kept);
    void settle_choices(const Model& model, int64_t rows);
    struct Column {  // an array with `width` 4-byte numbers per row
        void* numbers;
        int64_t width;
    };
    void prepare_exchange(const Collectives* ranks, int64_t rows, int64_t width);
    void exchange_rows(const Collectives& ranks, int64_t rows, std::initializer_list<Column> columns);
    void prepare_sampling(int64_t vocab);
    void sample(int thread, const Step& step, int64_t row, int64_t vocab, const float* logits);
    bool can_sample(const Step& step, int64_t row);

    Team team;
    std::vector<Own> own_;
    std::vector<Chunk> chunks_;
    std::vector<int32_t> chunk_of_row_;
    std::vector<const float*> given_of_row_;  // empty if all rows use embeddings of tokens
    std::vector<int64_t> slot_of_row_;    // index of a row's token among the tokens of all pages
    std::vector<float*> logits_of_row_;  // for each sampled row, or null if its logits are not kept
    std::vector<Choice> choices_, all_choices_;  // for each sampled row, and for the rows of each rank
    std::vector<int32_t> vocab_counts_;  // for each rank
    std::map<PlanKey, AttentionPlan> plans_;
    std::vector<float> temperatures_;  // for each row
    std::unique_ptr<std::atomic<int>[]> parts_done_;
    int64_t rows_ = 0, parts_done_count_ = 0;
    std::atomic<bool> is_abandoned_{false};
    int64_t room_count_ = 0;
    float* room_ = nullptr;  // memory for this rank's part of the next sum. Null: the part is written where its total will be
    std::vector<int32_t> chosen_, expert_firsts_, expert_nexts_, expert_rows_;  // for mixtures of experts
    std::vector<float> chosen_weights_, expert_weights_, shared_weights_, ones_;
    bool is_invariant_ = false;
    bool packs_decodes_ = false;  // true if decodes must sum like prompts but usually do not
    Buffer hidden_, normed_, beside_, quantized_, qkv_, product_, queries_, attended_, activated_, angles_, partials_, sampled_, logits_;
    Buffer chances_, gathered_, mixed_, shortcut_;
    Buffer projected_, convolved_, scanned_, recurrent_, selected_, latents_, time_steps_;  // for layers with a state
    Buffer raised_gates_, raised_decays_;
    Buffer compressed_, raised_, plain_, values_;  // for latent attention
    Buffer shared_, streams_, layer_inputs_, low_rank_, laurel_, gates_, attention_gates_, logits_of_ranks_, exchanged_;
    StepAdapters adapters_;
};

// Number of rows, including those after the last one that products may read.
static int64_t readable(int64_t rows) { return rounded_up(rows, 16) + 16; }

void Engine::plan_rows(const Model& model, const Step& step) {
    rows_ = step.row_count;
    packs_decodes_ = (is_invariant_ || model.latent_dim > 0) && model.dtype == BFLOAT16 && IN_TILES<bf16>;
    chunks_.clear();
    chunk_of_row_.clear();
    given_of_row_.assign(step.given_count ? step.row_count : 0, nullptr);
    for (int32_t given = 0; given < step.given_count; given++)
        given_of_row_[step.given_rows[given]] = step.given_values + given * step.given_width;
    for (int32_t index = 0; index < step.chunk_count; index++) {
        chunks_.push_back({int64_t(chunk_of_row_.size()), step.chunk_counts[index], step.chunk_starts[index],
                           step.tables + step.table_firsts[index],
                           step.row_ends == nullptr ? nullptr : step.row_ends + chunk_of_row_.size()});
        chunk_of_row_.insert(chunk_of_row_.end(), step.chunk_counts[index], index);
    }
    slot_of_row_.resize(rows_);
    for (const Chunk& chunk : chunks_)
        for (int64_t token = 0; token < chunk.count; token++)
            slot_of_row_[chunk.first_row + token] = token_of(chunk, chunk.start + token, model.page_tokens);
    plans_.clear();
    int64_t partials = 0;
    for (int32_t index = 0; index < model.layer_count; index++) {
        const Layer& layer = model.layers[index];
        if (!attends(layer) || plans_.count(plan_key(layer))) continue;
        const AttentionShape shape = shape_of(model, layer);
        const AttentionPlan& plan = plans_[plan_key(layer)] = plan_attention(shape, {layer.window, layer.section});
        partials = std::max(partials, plan.part_count * partial_count(shape));
    }
    temperatures_.resize(rows_);
    for (const Chunk& chunk : chunks_)
        for (int64_t token = 0; token < chunk.count && model.temperature_interval > 0; token++) {
            const int64_t steps = (chunk.start + token + model.temperature_first) / model.temperature_interval;
            temperatures_[chunk.first_row + token] = float(1.0 + double(model.temperature_scale) * std::log1p(double(steps)));
        }
    partials_.of<float>(partials);
    if (parts_done_count_ < rows_) {
        parts_done_count_ = rows_ + rows_ / 4;
        parts_done_.reset(new std::atomic<int>[parts_done_count_]);
        for (int64_t row = 0; row < parts_done_count_; row++) parts_done_[row] = 0;
    }
}

// Makes pieces for the parts that rows first .. end - 1 share after position `from`, and then for groups of these rows that
// share more. The rows are sorted by their block tables.
void Engine::share(const AttentionShape& shape, DecodeRow* first, DecodeRow* end, int64_t from, AttentionPlan& plan) const {
    if (end - first < SHARERS_MIN) return;
    const int64_t common = common_pages(*first, end[-1]);
    const int64_t to = common * shape.page_tokens / PART_TOKENS * PART_TOKENS;
    if (to > from) {
        const int64_t batch = piece_tokens_max(shape), batches = (end - first + batch - 1) / batch;
        const int64_t wanted = int64_t(team.thread_count()) * PIECES_OF_THREAD / (shape.kv_heads * batches) + 1;
        const int64_t tokens = rounded_up((to - from + wanted - 1) / wanted, PART_TOKENS);  // tokens of a piece
        const int32_t sharers_first = int32_t(plan.sharers.size());
        for (DecodeRow* decode = first; decode < end; decode++) {
            plan.sharers.push_back(decode->row);
            plan.parts[decode->row].writes += int32_t((to - from + tokens - 1) / tokens * shape.kv_heads);
            decode->shared_tokens = to;
        }
        for (int64_t begin = from; begin < to; begin += tokens)
            for (int64_t index = 0; index < batches; index++) {
                const int32_t sharer = int32_t((end - first) * index / batches);
                const int32_t count = int32_t((end - first) * (index + 1) / batches) - sharer;
                for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
                    AttentionPiece piece{};
                    piece.kind = AttentionPiece::SHARED;
                    piece.chunk = first->chunk;
                    piece.kv_head = kv_head;
                    piece.from = int32_t(begin);
                    piece.to = int32_t(std::min(begin + tokens, to));
                    piece.sharers_first = sharers_first + sharer;
                    piece.sharer_count = count;
                    plan.pieces.push_back(piece);
                }
            }
        from = to;
    }
    // Rows that end here come first.
    while (first < end && first->pages_seen == common) first++;
    while (first < end) {
        DecodeRow* next = first;
        while (next < end && next->table[common] == first->table[common]) next++;
        share(shape, first, next, from, plan);
        first = next;
    }
}

AttentionPlan Engine::plan_attention(const AttentionShape& shape, const Reach& reach) const {
    const int64_t window = reach.window;
    AttentionPlan plan;
    plan.parts.resize(rows_);
    for (const Chunk& chunk : chunks_) {
        if (reach.section == 0) {
            plan.chunks.push_back(chunk);
            continue;
        }
        const int64_t end = chunk.start + chunk.count;
        for (int64_t base = chunk.start / reach.section * reach.section; base < end; base += reach.section) {
            const int64_t first = std::max(chunk.start, base), last = std::min(end, base + reach.section);
            plan.chunks.push_back({chunk.first_row + first - chunk.start, last - first, first - base,
                                   chunk.table + base / shape.page_tokens});
        }
    }
    std::vector<DecodeRow> decodes;
    int64_t prompt_tokens = 0;
    for (const Chunk& chunk : plan.chunks)
        if (chunk.count > DIRECT_TOKENS_MAX) prompt_tokens += chunk.count;
    // Large pieces pack less often. Small pieces divide the work better.
    const int64_t pieces = team.thread_count() > 1 ? int64_t(team.thread_count()) * PIECES_OF_THREAD : 1;
    const int64_t wanted_tokens = std::max<int64_t>(prompt_tokens * shape.kv_heads / pieces, PIECE_TOKENS_MIN);
    const int64_t size = std::min(piece_tokens_max(shape), rounded_up(wanted_tokens, 16));
    for (size_t index = 0; index < plan.chunks.size(); index++) {
        const Chunk& chunk = plan.chunks[index];
        if (chunk.count <= DIRECT_TOKENS_MAX) {
            for (int64_t token = 0; token < chunk.count; token++) {
                const int64_t position = chunk.start + token;
                // Pages before a window may already belong to another sequence, so they are not shared.
                const int64_t pages_seen = first_seen(position, window) > 0 ? 0 : chunk.end_of(position) / shape.page_tokens;
                decodes.push_back({chunk.table, pages_seen, 0, int32_t(chunk.first_row + token), int32_t(index)});
            }
            continue;
        }
        // The last tokens see most. They come first, so that the threads end at the same time.
        for (int64_t token = (chunk.count - 1) / size * size; token >= 0; token -= size)
            for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
                AttentionPiece piece{};
                piece.kind = AttentionPiece::PROMPT;
                piece.chunk = int32_t(index);
                piece.token = int32_t(token);
                piece.tokens = int32_t(std::min(size, chunk.count - token));
                piece.kv_head = kv_head;
                plan.pieces.push_back(piece);
            }
    }
    // Rows with equal first blocks become neighbours. If no blocks are equal, a comparison reads one number of each.
    std::stable_sort(decodes.begin(), decodes.end(), [](const DecodeRow& a, const DecodeRow& b) {
        return std::lexicographical_compare(a.table, a.table + a.pages_seen, b.table, b.table + b.pages_seen);
    });
    share(shape, decodes.data(), decodes.data() + decodes.size(), 0, plan);
    const auto own_tokens = [&](const DecodeRow& decode) {
        const Chunk& chunk = plan.chunks[decode.chunk];
        const int64_t position = chunk.start + decode.row - chunk.first_row;
        return Seen{std::max(decode.shared_tokens, first_seen(position, window)), chunk.end_of(position)};
    };
    int64_t direct_tokens = 0;
    for (const DecodeRow& decode : decodes) direct_tokens += own_tokens(decode).end - own_tokens(decode).begin;
    const int64_t wanted = direct_tokens / (int64_t(team.thread_count()) * PIECES_OF_THREAD) + 1;
    const int64_t part_count = (wanted + PART_TOKENS - 1) / PART_TOKENS;  // parts of a piece
    for (const DecodeRow& decode : decodes) {
        const Seen own = own_tokens(decode);
        const int64_t end = (own.end + PART_TOKENS - 1) / PART_TOKENS;
        RowParts& parts = plan.parts[decode.row];
        for (int64_t part = own.begin / PART_TOKENS; part < end; part += part_count) {
            AttentionPiece piece{};
            piece.chunk = decode.chunk;
            piece.from = int32_t(std::max(own.begin, part * PART_TOKENS));
            piece.to = int32_t(std::min(own.end, (part + part_count) * PART_TOKENS));
            if (!packs_decodes_) {
                piece.kind = AttentionPiece::DIRECT;
                piece.token = int32_t(decode.row - plan.chunks[decode.chunk].first_row);
                piece.tokens = 1;
                parts.writes++;
                plan.pieces.push_back(piece);
                continue;
            }
            piece.kind = AttentionPiece::SHARED;
            piece.sharers_first = int32_t(plan.sharers.size());
            piece.sharer_count = 1;
            plan.sharers.push_back(decode.row);
            for (piece.kv_head = 0; piece.kv_head < shape.kv_heads; piece.kv_head++) {
                parts.writes++;
                plan.pieces.push_back(piece);
            }
        }
        parts.first = decode.shared_tokens > 0 ? 0 : int32_t(own.begin / PART_TOKENS);
        parts.count = int32_t(end) - parts.first;
        parts.place = plan.part_count;
        parts.position = plan.chunks[decode.chunk].start + decode.row - plan.chunks[decode.chunk].first_row;
        plan.part_count += parts.count;
    }
    return plan;
}

template <class T>
QuantizedRows Engine::quantize_rows(int thread, const Rows<const T>& x, int64_t rows, int64_t k) {
    if (rows <= OWN_NORM_ROWS_MAX) {
        const QuantizedRows own = rows_at(own_[thread].quantized.of<int8_t>(quantized_rows_bytes(rows, k)), rows, k);
        for (int64_t row = 0; row < rows; row++) quantize_row(x, k, row, own);
        return own;
    }
    const QuantizedRows shared = rows_at(quantized_.of<int8_t>(0), rows, k);
    const int64_t pieces = (rows + ROWS_OF_PIECE - 1) / ROWS_OF_PIECE;
    for (int64_t piece; (piece = team.take_share(thread, pieces)) >= 0;)
        for (int64_t row = piece * ROWS_OF_PIECE; row < std::min(rows, (piece + 1) * ROWS_OF_PIECE); row++)
            quantize_row(x, k, row, shared);
    team.meet();
    return shared;
}

// The panel that a thread reads.
struct PanelPlace {
    const WeightPart* part;
    int64_t panel;  // index in the part

    PanelPlace(const Matrix& weight, int64_t panel) : part(weight.parts), panel(panel) {
        for (; this->panel >= panel_count(part->block_count); part++) this->panel -= panel_count(part->block_count);
    }
    template <class T>
    const uint8_t* data() const {
        const int64_t bytes = part->format == DENSE ? padded_depth(part->inputs) * PANEL * int64_t(sizeof(T))
                                                    : quantized_bytes(part->format, PANEL, part->inputs);
        return static_cast<const uint8_t*>(part->data) + panel * bytes;
    }
};

static Pieces pieces_of(const Matrix& weight, int64_t rows, int threads) {
    int64_t panels = 0;
    for (const WeightPart& part : weight.parts) panels += panel_count(part.block_count);
    return Pieces(rows, panels, weight.parts[0].inputs, threads);
}

// Returns the address that a thread reads first in a weight, or null if the weight is absent.
template <class T>
const uint8_t* Engine::first_read(int thread, const Matrix& weight, int64_t rows) const {
    if (weight.parts[0].block_count == 0) return nullptr;
    const Pieces pieces = pieces_of(weight, rows, team.thread_count());
    return PanelPlace(weight, pieces.at(team.share_of(thread, pieces.count())).panel).template data<T>();
}

// next: address that the thread reads after the product.
template <class T, class Finish>
void Engine::product(int thread, const Rows<const T>& x, int64_t rows, const Matrix& weight, const void* next,
                     const Finish& finish) {
    QuantizedRows quantized = {};
    for (const WeightPart& part : weight.parts)
        if (part.block_count > 0 && part.format != DENSE && quantized.values == nullptr && !x.are_tiles)
            quantized = quantize_rows(thread, x, rows, part.inputs);
    const Pieces pieces = pieces_of(weight, rows, team.thread_count());
    const int64_t last = team.share_of(thread + 1, pieces.count()) - 1;
    Finishing<Finish> finishing(finish);
    for (int64_t index; (index = team.take_share(thread, pieces.count())) >= 0;) {
        Piece piece = pieces.at(index);
        const PanelPlace place(weight, piece.panel);
        const WeightPart* part = place.part;
        piece.panel = place.panel;
        const uint8_t* after = next != nullptr ? static_cast<const uint8_t*>(next) : place.data<T>();
        // A thread that helps others does not know its next panel in advance.
        if (index < last) after = PanelPlace(weight, pieces.at(index + 1).panel).template data<T>();
        if (part->format == DENSE)
            compute_piece(piece, x, static_cast<const T*>(part->data), part->block_count, part->first_block, after,
                          finishing);
        else
            compute_quantized_piece(piece, x, quantized, part->format, static_cast<const uint8_t*>(part->data),
                                    part->block_count, own_[thread].dequantized.of<T>(panel_numbers(part->inputs)),
                                    part->first_block, after, finishing);
    }
    finishing.end();
}

template <class T>
void Engine::embed(int thread, const Model& model, const Step& step, float* hidden) {
    const int64_t size = model.hidden_size, half = model.turned_dim / 2;
    const Lanes scale = set(model.embedding_scale);
    float* angles = angles_.of<float>(0);
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        const int64_t token = step.token_ids[row] - model.vocab_first;
        float* to = hidden + row * size;
        if (token < 0 || token >= model.vocab_count) {
            std::fill(to, to + size, 0.0f);  // another rank has this token
        } else if (model.embedding != nullptr) {
            const T* from = static_cast<const T*>(model.embedding) + token * size;
            for (int64_t n = 0; n < size; n += LANES) store(to + n, load(from + n));
        } else {
            read_row<T>(model.head.parts[0], token, to);
        }
        if (model.embedding_scale != 1.0f)
            for (int64_t n = 0; n < size; n += LANES) store(to + n, mul(load(to + n), scale));
        const Chunk& chunk = chunks_[chunk_of_row_[row]];
        const int64_t position = chunk.start + row - chunk.first_row;
        if (model.positions != nullptr && is_first_rank(model)) {
            const T* from = static_cast<const T*>(model.positions) + (model.position_first + position) * size;
            for (int64_t n = 0; n < size; n += LANES) store(to + n, add(load(to + n), load(from + n)));
        }
        if (const float* given = given_of_row_.empty() ? nullptr : given_of_row_[row])
            for (int64_t n = 0; n < size; n += LANES) store(to + n, is_first_rank(model) ? load(given + n) : zero());
        for (int64_t rotary = 0; rotary < model.rotary_count; rotary++) {
            float* cosines = angles + (rotary * rows_ + row) * 2 * half;
            for (int64_t pair = 0; pair < half; pair++) {
                const int64_t turned =
                    step.positions == nullptr ? position : step.positions[row * 3 + model.axes[rotary * half + pair]];
                // float32 functions of C libraries differ in their results. float64 functions differ too little to matter
                // after rounding.
                const double angle = float(turned) * model.frequencies[rotary * half + pair];
                const float magnitude = model.magnitudes[rotary * half + pair];
                cosines[pair] = float(std::cos(angle)) * magnitude;
                cosines[half + pair] = float(std::sin(angle)) * magnitude;
            }
        }
    }
}

template <class T>
Rows<const T> Engine::norm_rows(int thread, const float* hidden, int64_t rows, int64_t size, const float* weight,
                                const Norm& kind, T* shared) {
    const auto norm = [=](int64_t row, const Rows<T>& to) {
        norm_row(hidden + row * size, weight, size, kind, [=](int64_t n) { return to.at(row, n); });
        to.pad(row, size);
    };
    if (rows <= OWN_NORM_ROWS_MAX) {
        const auto own = rows_for<T>(own_[thread].normed.of<T>(readable(rows) * padded_depth(size)), rows, size);
        for (int64_t row = 0; row < rows; row++) norm(row, own);
        return own;
    }
    const auto normed = rows_for<T>(shared, rows, size);
    const int64_t pieces = (rows + ROWS_OF_PIECE - 1) / ROWS_OF_PIECE;
    for (int64_t piece; (piece = team.take_share(thread, pieces)) >= 0;)
        for (int64_t row = piece * ROWS_OF_PIECE; row < std::min(rows, (piece + 1) * ROWS_OF_PIECE); row++)
            norm(row, normed);
    team.meet();
    return normed;
}

// hidden = total_scale * (hidden + scale * norm of product). product is overwritten.
void Engine::add_normed(int thread, float* product, int64_t rows, int64_t size, const float* weight, const Norm& norm,
                        float scale, float* hidden, float total_scale) {
    for (int64_t row; (row = team.take_share(thread, rows)) >= 0;) {
        float *from = product + row * size, *to = hidden + row * size;
        norm_row(from, weight, size, norm, [=](int64_t n) { return from + n; });
        for (int64_t n = 0; n < size; n += LANES)
            store(to + n, mul(fma(load(from + n), set(scale), load(to + n)), set(total_scale)));
    }
    team.meet();
}

// activated = activation(gate) * up of x, or activation(up) without a gate. adapted_layer: layer whose adapters add to it, or
// -1.
template <class T>
void Engine::gate(int thread, const Rows<const T>& x, int64_t rows, const Matrix& gate_up, const float* bias,
                  const Layer& layer, const Rows<T>& activated, const void* next, int32_t adapted_layer) {
    const int64_t middle = outputs_of(layer, gate_up);
    const Xielu xielu(layer.activation_weights);
    float* raw = gates_.of<float>(0);  // [rows][2][middle], if gates have a cutoff
    product(thread, x, rows, gate_up, next, [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
        if (adapted_layer >= 0)
            adapters_.add_to<T>(&AdapterLayer::gate_up, adapted_layer, first_row, count, first_block, blocks, sums);
        for (int row = 0; !layer.has_gate && row < count; row++) {
            for (int block = 0; block < blocks; block++) {
                const int64_t n = (first_block + block) * LANES;
                Lanes value = load(sums + row * PANEL + block * LANES);
                if (bias != nullptr) value = add(value, load(bias + n));
                value = layer.activation == XIELU ? xielu.of(value) : activate<T>(layer.activation, value);
                store(activated.at(first_row + row, n), value);
                if (n + LANES == middle) activated.pad(first_row + row, middle);
            }
        }
        if (!layer.has_gate) return;
        const int64_t n = first_block / 2 * LANES;
        for (int row = 0; row < count; row++) {
            Lanes gate = load(sums + row * PANEL), up = load(sums + row * PANEL + LANES);
            if (bias != nullptr) {
                gate = add(gate, load(bias + first_block * LANES));
                up = add(up, load(bias + first_block * LANES + LANES));
            }
            if (layer.has_cutoff) {
                store(raw + (first_row + row) * 2 * middle + n, gate);
                store(raw + (first_row + row) * 2 * middle + middle + n, up);
                continue;
            }
            store(activated.at(first_row + row, n), activate<T>(layer.activation, gate, up));
            if (n + LANES == middle) activated.pad(first_row + row, middle);
        }
    });
    if (!layer.has_cutoff) return;
    team.meet();
    for (int64_t row; (row = team.take_share(thread, rows)) >= 0;) {
        const float* gates = raw + row * 2 * middle;
        cut_and_gate<T>(layer.activation, layer.cutoff, gates, gates + middle, middle,
                        [&](int64_t n) { return activated.at(row, n); });
        activated.pad(row, middle);
    }
}

// Allocates memory before the threads start, because a thread cannot report a failure.
template <class T>
void Engine::make_room_for_streams(const Model& model) {
    int64_t rank = 0, cut = 0;
    for (int32_t index = 0; index < model.layer_count; index++) {
        const Layer& layer = model.layers[index];
        if (layer.laurel != nullptr) rank = std::max<int64_t>(rank, layer.laurel->rank);
        if (layer.has_cutoff) cut = std::max<int64_t>(cut, layer.gate_up.parts[0].block_count * LANES);
    }
    gates_.of<float>(rows_ * cut);
    laurel_.of<float>(rank > 0 ? rows_ * model.hidden_size : 0);
    if (model.streams != nullptr) {
        const int64_t inputs = int64_t(model.layer_count) * model.streams->input_size;
        rank = std::max<int64_t>(rank, model.streams->input_size);
        streams_.of<float>(model.streams->count > 1 ? model.streams->count * rows_ * model.hidden_size : 0);
        layer_inputs_.of<float>(rows_ * inputs);
        for (Own& own : own_) own.table_row.of<float>(inputs);
    }
    low_rank_.of<T>(rank > 0 ? readable(rows_) * padded_depth(rank) : 0);
}

// hidden: embeddings, which become the first stream.
template <class T>
void Engine::begin_streams(int thread, const Model& model, const Step& step, const float* hidden, T* normed) {
    const Streams& streams = *model.streams;
    const int64_t size = model.hidden_size, input_size = streams.input_size, inputs = model.layer_count * input_size;
    float* layer_inputs = layer_inputs_.of<float>(0);
    const Norm norm{model.norm_kind, model.norm_eps};
    const Rows<const T> x = norm_rows(thread, hidden, rows_, size, nullptr, norm, normed);
    product<T>(thread, x, rows_, streams.input_projection, nullptr, kept_in(layer_inputs, inputs));
    team.meet();
    for (int stream = 1; stream < streams.count; stream++) {
        product<T>(thread, x, rows_, streams.ins[stream - 1], nullptr, kept_in(stream_at(size, 0, stream), size));
        team.meet();
    }
    const Lanes projection_scale = set(1.0f / std::sqrt(float(size))), half = set(std::sqrt(0.5f));
    const Lanes table_scale = set(streams.table_scale);
    float* table_row = own_[thread].table_row.of<float>(0);
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        const float* embedding = hidden + row * size;
        const float square = mean_square(embedding, size);
        for (int64_t n = 0; streams.count > 1 && n < size; n += LANES)
            store(stream_at(size, row, 0) + n, load(embedding + n));
        for (int stream = 1; stream < streams.count; stream++) {
            float* values = stream_at(size, row, stream);
            const Lanes share = set(share_for_magnitude(values, size, square));
            for (int64_t n = 0; n < size; n += LANES) store(values + n, mul(load(values + n), share));
        }
        const int64_t token = step.token_ids[row];
        read_row<T>(streams.input_table.parts[0], token < streams.input_vocab_size ? token : 0, table_row);
        for (int64_t first = 0; first < inputs; first += input_size) {
            float* input = layer_inputs + row * inputs + first;
            for (int64_t n = 0; n < input_size; n += LANES) store(input + n, mul(load(input + n), projection_scale));
            norm_row(input, streams.input_norm, input_size, norm, [=](int64_t n) { return input + n; });
            for (int64_t n = 0; n < input_size; n += LANES)
                store(input + n, mul(fma(load(table_row + first + n), table_scale, load(input + n)), half));
        }
    }
    team.meet();
}

// hidden: receives the stream that the layer computes.
void Engine::predict_streams(int thread, const Model& model, const Layer& layer, float* hidden) {
    const int64_t size = model.hidden_size;
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;)
        predict_row(*model.streams, *layer.streams, size, model.norm_eps,
                    [&](int stream) { return stream_at(size, row, stream); }, hidden + row * size);
    team.meet();
}

// hidden: result of the layer.
template <class T>
void Engine::correct_streams(int thread, const Model& model, int32_t index, float* hidden, float* outputs, T* normed) {
    const Streams& streams = *model.streams;
    const Layer& layer = model.layers[index];
    const int64_t size = model.hidden_size, input_size = streams.input_size, inputs = model.layer_count * input_size;
    const float* layer_inputs = layer_inputs_.of<float>(0) + index * input_size;
    const Norm norm{model.norm_kind, model.norm_eps};
    for (int64_t row; streams.count > 1 && (row = team.take_share(thread, rows_)) >= 0;)
        correct_row(streams, *layer.streams, size, model.norm_eps,
                    [&](int stream) { return stream_at(size, row, stream); }, hidden + row * size);
    if (streams.count > 1) team.meet();
    const Rows<const T> x = norm_rows(thread, hidden, rows_, size, nullptr, norm, normed);
    const auto gated = rows_for<T>(low_rank_.of<T>(0), rows_, input_size);
    product<T>(thread, x, rows_, layer.streams->input_gate, nullptr,
               [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                   for (int row = 0; row < count; row++)
                       for (int block = 0; block < blocks; block++) {
                           const int64_t n = (first_block + block) * LANES;
                           const Lanes input = load(layer_inputs + (first_row + row) * inputs + n);
                           store(gated.at(first_row + row, n),
                                 activate<T>(layer.activation, load(sums + row * PANEL + block * LANES), input));
                           if (n + LANES == input_size) gated.pad(first_row + row, input_size);
                       }
               });
    team.meet();
    product<T>(thread, gated, rows_, layer.streams->input_projection, nullptr, kept_in(outputs, size));
    team.meet();
    if (streams.count == 1) {
        add_normed(thread, outputs, rows_, size, layer.streams->input_norm, norm, 1.0f, hidden, scale_of(layer));
        return;
    }
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        float* given = outputs + row * size;
        norm_row(given, layer.streams->input_norm, size, norm, [=](int64_t n) { return given + n; });
        for (int stream = 1; stream < streams.count; stream++) {
            float* values = stream_at(size, row, stream);
            for (int64_t n = 0; n < size; n += LANES) store(values + n, add(load(values + n), load(given + n)));
        }
    }
    team.meet();
}

// hidden: receives the hidden state after the last layer.
template <class T>
void Engine::end_streams(int thread, const Model& model, float* hidden, float* outputs, T* normed) {
    const Streams& streams = *model.streams;
    const int64_t size = model.hidden_size;
    const Norm norm{model.norm_kind, model.norm_eps};
    for (int stream = 1; stream < streams.count; stream++) {
        const Rows<const T> x = norm_rows(thread, stream_at(size, 0, stream), rows_, size, nullptr, norm, normed);
        product<T>(thread, x, rows_, streams.outs[stream - 1], nullptr, kept_in(outputs, size));
        team.meet();
        const bool is_last = stream + 1 == streams.count;
        for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
            const float *first = stream_at(size, row, 0), *from = outputs + row * size;
            float* to = hidden + row * size;
            const float* total = stream == 1 ? first : to;
            const Lanes share = set(share_for_magnitude(from, size, mean_square(first, size)));
            const Lanes scale = set(is_last ? 1.0f / float(streams.count) : 1.0f);
            for (int64_t n = 0; n < size; n += LANES)
                store(to + n, mul(fma(load(from + n), share, load(total + n)), scale));
        }
        team.meet();
    }
}

// Computes LAuReL from the input of attention, into laurel_.
template <class T>
void Engine::make_laurel(int thread, const Laurel& laurel, const Rows<const T>& x, int64_t size) {
    const auto lowered = rows_for<T>(low_rank_.of<T>(0), rows_, laurel.rank);
    product<T>(thread, x, rows_, laurel.inwards, nullptr,
               [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                   for (int row = 0; row < count; row++)
                       for (int block = 0; block < blocks; block++) {
                           const int64_t n = (first_block + block) * LANES;
                           store(lowered.at(first_row + row, n), load(sums + row * PANEL + block * LANES));
                           if (n + LANES == laurel.rank) lowered.pad(first_row + row, laurel.rank);
                       }
               });
    team.meet();
    product<T>(thread, lowered, rows_, laurel.outwards, nullptr, kept_in(laurel_.of<float>(0), size));
    team.meet();
}

// hidden: the input x plus the result of attention.
template <class T>
void Engine::add_laurel(int thread, const Laurel& laurel, const Rows<const T>& x, int64_t size, const Norm& norm,
                        float* hidden) {
    const Lanes half = set(std::sqrt(0.5f));
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        float *from = laurel_.of<float>(0) + row * size, *to = hidden + row * size;
        norm_row(from, laurel.norm, size, norm, [=](int64_t n) { return from + n; });
        for (int64_t n = 0; n < size; n += LANES) {
            const Lanes added = add(load(x.at(row, n)), load(from + n));
            store(to + n, mul(add(load(to + n), added), half));
        }
    }
    team.meet();
}

// Allocates memory before the threads start, because a thread cannot report a failure.
template <class T>
void Engine::make_room_for_experts(const Model& model) {
    int64_t count = 0, places = 0;
    for (int32_t index = 0; index < model.layer_count; index++) {
        const Layer& layer = model.layers[index];
        const Experts* experts = layer.experts != nullptr ? layer.experts : layer.shortcut;
        if (experts == nullptr) continue;
        if (layer.shortcut != nullptr) shortcut_.of<float>(rows_ * model.hidden_size);
        count = std::max<int64_t>(count, experts->count);
        places = std::max<int64_t>(places, rows_ * experts->per_token);
    }
    if (count == 0) return;
    for (auto* numbers : {&chosen_, &expert_rows_}) numbers->resize(places);
    for (auto* numbers : {&chosen_weights_, &expert_weights_}) numbers->resize(places);
    for (auto* numbers : {&expert_firsts_, &expert_nexts_}) numbers->resize(count + 1);
    for (auto* numbers : {&shared_weights_, &ones_}) numbers->assign(rows_, 1.0f);
    chances_.of<float>(2 * rows_ * rounded_up(count, LANES));
    gathered_.of<T>(readable(rows_) * padded_depth(model.hidden_size));
    mixed_.of<T>(readable(rows_) * padded_depth(model.intermediate_size));
}

// Sorts rows by their experts, in the order of the experts.
void Engine::sort_by_expert(const Experts& experts) {
    const int64_t count = rows_ * experts.per_token;
    std::fill(expert_firsts_.begin(), expert_firsts_.end(), 0);
    for (int64_t index = 0; index < count; index++) expert_firsts_[chosen_[index] + 1]++;
    for (int32_t expert = 0; expert < experts.count; expert++) expert_firsts_[expert + 1] += expert_firsts_[expert];
    std::copy(expert_firsts_.begin(), expert_firsts_.end(), expert_nexts_.begin());
    for (int64_t index = 0; index < count; index++) {
        const int32_t place = expert_nexts_[chosen_[index]]++;
        expert_rows_[place] = int32_t(index / experts.per_token);
        expert_weights_[place] = chosen_weights_[index];
    }
}

// to = base + mixture of experts of x, times the residual scale unless a norm follows. A null base is zeros. base may be `to`.
// Experts are computed one after the other, so a row is summed in the same order in every batch. hidden: the rows of x before
// their norm.
template <class T>
void Engine::mix(int thread, const Model& model, const Layer& layer, const Experts& experts, const float* hidden,
                 const Rows<const T>& x, const float* base, float* to) {
    const int64_t size = model.hidden_size, padded_count = rounded_up(experts.count, LANES);
    const float scale = layer.mlp_output_norm == nullptr ? layer.residual_scale : 1.0f;
    float* chances = chances_.of<float>(0);
    // With norms of their own, router and experts read other rows than the shared expert, whose result is added later.
    const bool has_norms = experts.router_norm != nullptr;
    float* shared_to = has_norms ? shared_.of<float>(0) : to;
    const auto beside = rows_for<T>(beside_.of<T>(0), rows_, size);
    const Rows<const T> own_x = has_norms ? Rows<const T>(beside) : x;
    const Norm norm{model.norm_kind, model.norm_eps};
    const auto norm_beside = [&](const float* weight) {
        for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
            norm_row(hidden + row * size, weight, size, norm, [&](int64_t n) { return beside.at(row, n); });
            beside.pad(row, size);
        }
        team.meet();
    };
    if (has_norms) norm_beside(experts.router_norm);
    product(thread, own_x, rows_, experts.router, nullptr,
            [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                for (int row = 0; row < count; row++)
                    for (int block = 0; block < blocks; block++) {
                        const int64_t n = (first_block + block) * LANES;
                        Lanes chance = load(sums + row * PANEL + block * LANES);
                        if (experts.router_bias != nullptr) chance = add(chance, load(experts.router_bias + n));
                        store(chances + (first_row + row) * padded_count + n, chance);
                    }
            });
    team.meet();
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        const int64_t first = row * experts.per_token;
        float* scores = chances + row * padded_count;
        choose_experts(experts, scores, scores + rows_ * padded_count, chosen_.data() + first,
                       chosen_weights_.data() + first);
        if (base == nullptr)
            std::fill(to + row * size, to + (row + 1) * size, 0.0f);
        else if (base != to)
            std::memcpy(to + row * size, base + row * size, sizeof(float) * size);
        float kept = 0;  // weight of the experts that return their input
        for (int64_t place = first; place < first + experts.per_token; place++)
            if (chosen_[place] >= experts.identity_first) kept += chosen_weights_[place] * scale;
        for (int64_t n = 0; kept != 0 && n < size; n += LANES)
            store(to + row * size + n, fma(load(x.at(row, n)), set(kept), load(to + row * size + n)));
        if (has_norms) std::fill(shared_to + row * size, shared_to + (row + 1) * size, 0.0f);
        if (experts.shared_gate == nullptr) continue;
        Lanes sum = zero();
        for (int64_t n = 0; n < size; n += LANES) sum = fma(load(x.at(row, n)), load(experts.shared_gate + n), sum);
        shared_weights_[row] = 1.0f / (1.0f + std::exp(-sum_of(sum)));
    }
    team.meet();
    if (thread == 0) sort_by_expert(experts);
    team.meet();
    if (has_norms) norm_beside(experts.norm);
    // rows_at: destination rows. Null: the same rows.
    const auto go_through = [&](const Rows<const T>& some, int64_t count, int64_t middle, const Matrix& gate_up,
                                const float* gate_up_bias, const Matrix& down, const float* down_bias,
                                const int32_t* rows_at, const float* weights, float* totals) {
        const auto activated = rows_for<T>(mixed_.of<T>(0), count, middle);
        team.meet();
        gate<T>(thread, some, count, gate_up, gate_up_bias, layer, activated, nullptr, -1);
        team.meet();
        product<T>(thread, activated, count, down, nullptr,
                   [&](int64_t first_row, int found, int64_t first_block, int blocks, float* sums) {
                       for (int index = 0; index < found; index++) {
                           const int64_t row = rows_at == nullptr ? first_row + index : rows_at[first_row + index];
                           const Lanes weight = set(weights[first_row + index] * scale);
                           float* total = totals + row * size + first_block * LANES;
                           for (int block = 0; block < blocks; block++) {
                               Lanes value = load(sums + index * PANEL + block * LANES);
                               if (down_bias != nullptr) value = add(value, load(down_bias + (first_block + block) * LANES));
                               store(total + block * LANES, fma(value, weight, load(total + block * LANES)));
                           }
                       }
                   });
        team.meet();
    };
    for (int32_t own = 0; own < experts.own_count; own++) {
        const int32_t expert = experts.own_first + own;
        const int32_t first = expert_firsts_[expert], count = expert_firsts_[expert + 1] - first;
        if (count == 0) continue;
        const auto some = rows_for<T>(gathered_.of<T>(0), count, size);
        for (int64_t index; (index = team.take_share(thread, count)) >= 0;) {
            const int64_t row = expert_rows_[first + index];
            const Lanes weight = set(expert_weights_[first + index]);
            for (int64_t n = 0; n < size; n += LANES) {
                if (experts.weighs_inputs)
                    store(some.at(index, n), mul(load(own_x.at(row, n)), weight));
                else
                    std::memcpy(some.at(index, n), own_x.at(row, n), sizeof(T) * LANES);
            }
            some.pad(index, size);
        }
        const auto bias_of = [=](const float* biases, int64_t outputs) {
            return biases == nullptr ? nullptr : biases + own * outputs;
        };
        go_through(some, count, experts.middle, experts.gate_up[own], bias_of(experts.gate_up_bias, 2 * experts.middle),
                   experts.down[own], bias_of(experts.down_bias, size), expert_rows_.data() + first,
                   experts.weighs_inputs ? ones_.data() : expert_weights_.data() + first, to);
    }
    if (experts.shared_middle == 0) return;
    go_through(x, rows_, experts.shared_middle, experts.shared_gate_up, nullptr, experts.shared_down, nullptr, nullptr,
               shared_weights_.data(), shared_to);
    for (int64_t row; has_norms && (row = team.take_share(thread, rows_)) >= 0;) {
        float *total = to + row * size, *shared = shared_to + row * size;
        norm_row(total, experts.output_norm, size, norm, [=](int64_t n) { return total + n; });
        norm_row(shared, experts.shared_output_norm, size, norm, [=](int64_t n) { return shared + n; });
        for (int64_t n = 0; n < size; n += LANES) store(total + n, add(load(total + n), load(shared + n)));
    }
    if (has_norms) team.meet();
}

template <class T>
T* Engine::query_at(const AttentionShape& shape, int64_t row, int64_t head, T* queries) const {
    const int64_t group = shape.group();
    return queries + ((head / group * rows_ + row) * group + head % group) * shape.query_stride();
}

// Position of numbers n .. n + 15 of a product whose heads are rotated only when they are complete.
static int64_t place_in_qkv(const AttentionShape& shape, const Layer& layer, int64_t n) {
    const int64_t dim = shape.head_dim, d = n % dim;
    if (!layer.pairs_together || n >= (shape.heads + shape.kv_heads) * dim) return n;
    return n - d + d / LANES % 2 * (dim / 2) + d / (2 * LANES) * LANES;
}

template <class T>
void Engine::turn_and_store(const Model& model, const Layer& layer, float* qkv, int64_t row, T* queries,
                            T* pages) {
    const AttentionShape shape = shape_of(model, layer);
    const int64_t dim = shape.head_dim, half = dim / 2;
    const float* cosines = angles_.of<float>(0) + (layer.rotary * rows_ + row) * model.turned_dim;
    const float* sines = cosines + model.turned_dim / 2;
    const bool is_unbiased = model.norm_kind == BIASED_LAYER_NORM && layer.qk_norm != HEAD_NORM;
    const Norm kind{is_unbiased ? int32_t(LAYER_NORM) : model.norm_kind, model.norm_eps};
    T* slot = pages + slot_of_row_[row] * shape.token_stride();
    uint8_t* coded = reinterpret_cast<uint8_t*>(pages) + slot_of_row_[row] * shape.token_stride();
    float* from = qkv + row * qkv_size(layer);
    const int key_heads = layer.shares_kv ? 0 : shape.kv_heads;
    constexpr int64_t DIM_MAX = 512;
    alignas(64) float normed[DIM_MAX];
    alignas(64) float turned[DIM_MAX];
    if (layer.qk_norm == ROW_NORM) {
        const int64_t queries_size = shape.heads * dim;
        norm_row(from, layer.query_norm, queries_size, kind, [&](int64_t n) { return from + n; });
        norm_row(from + queries_size, layer.key_norm, shape.kv_heads * dim, kind,
                 [&](int64_t n) { return from + queries_size + n; });
    }
    for (int head = 0; head < shape.heads + key_heads; head++, from += dim) {
        const bool is_query = head < shape.heads;
        const float* norm = is_query ? layer.query_norm : layer.key_norm;
        const float* values = from;
        if (layer.qk_norm == HEADS_NORM) norm += (is_query ? head : head - shape.heads) * dim;
        const bool is_normed = layer.qk_norm == HEAD_NORM || layer.qk_norm == HEADS_NORM;
        if (is_normed && !layer.has_turned_norms) {
            norm_row(from, norm, dim, kind, [&](int64_t d) { return normed + d; });
            values = normed;
        }
        const float factor = is_query && !layer.has_turned_norms ? query_factor(layer, row) : 1.0f;
        for (int64_t pair = 0; pair < half; pair++) {
            const float cosine = cosines[pair] * factor, sine = sines[pair] * factor;
            turned[pair] = values[pair] * cosine - values[half + pair] * sine;
            turned[half + pair] = values[half + pair] * cosine + values[pair] * sine;
        }
        if (is_normed && layer.has_turned_norms) {
            norm_row(turned, norm, dim, kind, [&](int64_t d) { return turned + d; });
            const Lanes query = set(is_query ? query_factor(layer, row) : 1.0f);
            for (int64_t d = 0; d < dim; d += LANES) store(turned + d, mul(load(turned + d), query));
        }
        if (!is_query && shape.is_coded()) {
            encode_head(shape.kv_format, turned, dim, coded + (head - shape.heads) * shape.record_bytes());
            continue;
        }
        T* to = is_query ? query_at(shape, row, head, queries) : slot + (head - shape.heads) * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(turned + d));
    }
    for (int head = 0; layer.value_norm != nullptr && head < key_heads; head++)
        norm_row(from + head * dim, layer.value_norm, dim, kind, [&](int64_t d) { return from + head * dim + d; });
    if (layer.shares_kv) return;
    const int64_t value_dim = shape.value_dim();
    for (int head = 0; head < shape.kv_heads; head++, from += value_dim) {
        if (!shape.is_coded()) {
            T* value = slot + (shape.kv_heads + head) * dim;
            for (int64_t d = 0; d < value_dim; d += LANES) store(value + d, load(from + d));
            continue;
        }
        std::memcpy(turned, from, sizeof(float) * value_dim);
        std::fill(turned + value_dim, turned + dim, 0.0f);
        encode_head(shape.kv_format, turned, dim, coded + (shape.kv_heads + head) * shape.record_bytes());
    }
}

// Rotates and stores as soon as some rows' sums of one panel are complete: 16 pairs of a head with pairs_together, or up to 32
// numbers of values.
template <class T>
void Engine::turn_and_store(const Model& model, const Layer& layer, const float* sums, int64_t first_row, int count,
                            int64_t first_block, int blocks, T* queries, T* pages) {
    const AttentionShape shape = shape_of(model, layer);
    const int64_t dim = shape.head_dim, half = dim / 2, first = first_block * LANES, head = first / dim;
    const auto sum_of_block = [&](int row, int block) {
        const Lanes sum = load(sums + row * PANEL + block * LANES);
        return clipped(layer, layer.qkv_bias == nullptr ? sum : add(sum, load(layer.qkv_bias + first + block * LANES)));
    };
    const int64_t* slots = slot_of_row_.data() + first_row;
    if (head >= shape.heads + shape.kv_heads) {
        for (int row = 0; row < count; row++)
            for (int block = 0; block < blocks; block++) {
                const int64_t n = first - (shape.heads + shape.kv_heads) * dim + block * LANES, value_dim = shape.value_dim();
                T* values = pages + slots[row] * shape.token_stride() + shape.kv_heads * dim;
                store(values + n / value_dim * dim + n % value_dim, sum_of_block(row, block));
            }
        return;
    }
    const int64_t pair = first % dim / 2;
    const int64_t turned = model.turned_dim;
    const float* cosines = angles_.of<float>(0) + (layer.rotary * rows_ + first_row) * turned + pair;
    const bool is_query = head < shape.heads;
    T* query = is_query ? query_at(shape, first_row, head, queries) + pair : nullptr;
    const int64_t query_step = shape.group() * shape.query_stride();
    for (int row = 0; row < count; row++, cosines += turned) {
        const Lanes a = sum_of_block(row, 0), b = sum_of_block(row, 1);
        const Lanes factor = set(is_query ? query_factor(layer, first_row + row) : 1.0f);
        const Lanes cosine = mul(load(cosines), factor), sine = mul(load(cosines + turned / 2), factor);
        T* slot = pages + slots[row] * shape.token_stride();
        T* to = is_query ? query + row * query_step : slot + (head - shape.heads) * dim + pair;
        store(to, sub(mul(a, cosine), mul(b, sine)));
        store(to + half, fma(b, cosine, mul(a, sine)));
    }
}

template <class T>
void Engine::gate_attended(int thread, const Layer& layer, const AttentionShape& shape, const Rows<T>& attended) {
    const int64_t stride = gate_stride(layer, shape);
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        float* gates = attention_gates_.of<float>(0) + row * stride;
        for (int64_t n = 0; n < stride; n += LANES) {
            Lanes gate = load(gates + n);
            if (layer.attention_gate_bias != nullptr) gate = add(gate, load(layer.attention_gate_bias + n));
            store(gates + n, layer.has_softplus_gate ? softplus(gate) : sigmoid_of(gate));
        }
        for (int64_t n = 0; n < attended_size(shape); n += LANES) {
            const Lanes gate = layer.gates_heads ? set(gates[n / shape.value_dim()]) : load(gates + n);
            store(attended.at(row, n), mul(load(attended.at(row, n)), gate));
        }
    }
}

// Allocates memory before the threads start, because a thread cannot report a failure.
template <class T>
void Engine::make_room_for_states(const Model& model) {
    for (int32_t index = 0; index < model.layer_count; index++) {
        const Recurrent* layer = model.layers[index].recurrent;
        if (layer == nullptr) continue;
        projected_.of<float>(rows_ * projected_stride(*layer));
        convolved_.of<float>(rows_ * layer->channels);
        scanned_.of<float>(rows_ * layer->heads * layer->head_dim);
        for (Own& own : own_) own.vectors.of<float>(4 * layer->vectors);
        selected_.of<float>(layer->rank > 0 ? rows_ * (layer->rank + 2 * layer->vectors) : 0);
        const int64_t rank = std::max(layer->rank, layer->latent);
        latents_.of<T>(rank > 0 ? readable(rows_) * padded_depth(rank) : 0);
        time_steps_.of<float>(layer->rank > 0 ? rows_ * layer->channels : 0);
        raised_gates_.of<float>(layer->latent > 0 ? rows_ * layer->heads * layer->head_dim : 0);
        raised_decays_.of<float>(layer->latent > 0 ? rows_ * layer->heads * layer->vectors : 0);
    }
}

// Computes the latents of the time steps, b, c and the time steps of a selective scan. x: the convolved inputs.
template <class T>
void Engine::select(int thread, const Recurrent& layer, const Rows<const T>& x) {
    const int64_t rank = layer.rank, vectors = layer.vectors, size = rank + 2 * vectors, channels = layer.channels;
    product<T>(thread, x, rows_, layer.selection, nullptr, kept_in(selected_.of<float>(0), size));
    team.meet();
    const auto latents = rows_for<T>(latents_.of<T>(0), rows_, rank);
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        float* own = selected_.of<float>(0) + row * size;
        const float* weights = layer.selection_norm;
        if (weights != nullptr) {
            norm_group(own, weights, rank, layer.selection_eps);
            norm_group(own + rank, weights + rank, vectors, layer.selection_eps);
            norm_group(own + rank + vectors, weights + rank + vectors, vectors, layer.selection_eps);
        }
        for (int64_t n = 0; n < rank; n += LANES) store(latents.at(row, n), load(own + n));
        latents.pad(row, rank);
    }
    team.meet();
    float* time_steps = time_steps_.of<float>(0);
    product<T>(thread, latents, rows_, layer.time_step, nullptr,
               [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                   for (int row = 0; row < count; row++)
                       for (int block = 0; block < blocks; block++) {
                           const int64_t n = (first_block + block) * LANES;
                           const Lanes sum = load(sums + row * PANEL + block * LANES);
                           store(time_steps + (first_row + row) * channels + n,
                                 softplus(add(sum, load(layer.time_step_bias + n))));
                       }
               });
    team.meet();
}

// Multiplies the latents at `first` of the rows' projections with a weight. to: [rows][size].
template <class T>
void Engine::raise_latents(int thread, const Recurrent& layer, int64_t first, const Matrix& weight, float* to,
                           int64_t size) {
    const auto latents = rows_for<T>(latents_.of<T>(0), rows_, layer.latent);
    const float* from = projected_.of<float>(0) + first;
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        for (int64_t n = 0; n < layer.latent; n += LANES)
            store(latents.at(row, n), load(from + row * projected_stride(layer) + n));
        latents.pad(row, layer.latent);
    }
    team.meet();
    product<T>(thread, latents, rows_, weight, nullptr, kept_in(to, size));
    team.meet();
}

// Computes a recurrent layer from its first projection, which is complete. mixed: receives the input of the last projection.
// Writes the states.
template <class T>
void Engine::recur(int thread, const Step& step, const Recurrent& layer, float eps, float* memory, const Rows<T>& mixed) {
    const float* projected = projected_.of<float>(0);
    float *convolved = convolved_.of<float>(0), *scanned = scanned_.of<float>(0);
    const int64_t stride = projected_stride(layer), channels = layer.channels, inner = layer.heads * layer.head_dim;
    const int64_t pieces = (channels / LANES + CONV_BLOCKS - 1) / CONV_BLOCKS;
    // In a selective scan, the projection has the inputs of the convolution before the gate.
    const bool is_selective = layer.rank > 0, has_latents = layer.latent > 0;
    const int64_t inputs_at = is_selective ? 0 : has_latents ? layer.latent : inner, gate_at = is_selective ? channels : 0;
    const float *gates = projected + gate_at, *raised = nullptr;
    if (has_latents) {
        float *raised_gates = raised_gates_.of<float>(0), *raised_decays = raised_decays_.of<float>(0);
        raise_latents<T>(thread, layer, 0, layer.gate_up, raised_gates, inner);
        raise_latents<T>(thread, layer, layer.latent + channels, layer.decay_up, raised_decays, layer.heads * layer.vectors);
        gates = raised_gates, raised = raised_decays;
    }
    const int64_t gate_row = has_latents ? inner : stride;  // distance from a row's gates to the next row's
    for (int64_t index; (index = team.take()) < pieces * step.chunk_count;) {
        const int64_t chunk = index / pieces, first = index % pieces * CONV_BLOCKS * LANES;
        const int32_t begin = step.span_firsts[chunk], count = step.span_firsts[chunk + 1] - begin;
        for (int64_t n = first; n < std::min(first + CONV_BLOCKS * LANES, channels); n += LANES) {
            if (layer.heads > 0)
                convolve(layer, memory, step.spans + begin, count, n,
                         [&](int64_t row) { return load(projected + row * stride + inputs_at + n); },
                         [&](int64_t row, Lanes sum) {
                             const Lanes x = silu_of(sum);
                             store(convolved + row * channels + n, x);
                             if (!is_selective) return;
                             store(mixed.at(row, n), x);
                             if (n + LANES == channels) mixed.pad(row, channels);
                         });
            else
                convolve(layer, memory, step.spans + begin, count, n,
                         [&](int64_t row) {
                             const float* from = projected + row * stride + n;
                             return mul(load(from), load(from + 2 * channels));
                         },
                         [&](int64_t row, Lanes sum) {
                             store(mixed.at(row, n), mul(sum, load(projected + row * stride + channels + n)));
                         });
        }
    }
    team.meet();
    if (is_selective) {
        select<T>(thread, layer, mixed);
        for (int64_t index; (index = team.take()) < channels / LANES * step.chunk_count;) {
            const int64_t chunk = index / (channels / LANES), n = index % (channels / LANES) * LANES;
            const int32_t begin = step.span_firsts[chunk], count = step.span_firsts[chunk + 1] - begin;
            scan_selected(layer, memory, step.spans + begin, count, n, convolved, time_steps_.of<float>(0),
                          selected_.of<float>(0), scanned);
        }
        team.meet();
    } else if (layer.heads > 0) {
        for (int64_t index; (index = team.take()) < int64_t(layer.heads) * step.chunk_count;) {
            const int64_t chunk = index / layer.heads;
            const int32_t begin = step.span_firsts[chunk], count = step.span_firsts[chunk + 1] - begin;
            const int64_t head = index % layer.heads;
            if (layer.is_delta)
                scan_delta(layer, memory, step.spans + begin, count, head, projected, convolved, raised, scanned,
                           own_[thread].vectors.of<float>(0));
            else
                scan(layer, memory, step.spans + begin, count, head, projected, convolved, scanned);
        }
        team.meet();
    }
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        if (layer.heads > 0)
            gate_and_norm(layer, layer.norm_eps > 0.0f ? layer.norm_eps : eps, gates + row * gate_row, scanned + row * inner,
                          mixed, row);
        else
            mixed.pad(row, channels);
    }
    team.meet();
}

template <class T>
HeadRows<T> Engine::head_rows(Buffer& memory, int64_t heads, int64_t dim) const {
    const int64_t apart = readable(rows_) * padded_depth(dim);
    return {rows_for<T>(memory.of<T>(heads * apart), rows_, dim), dim, apart};
}

// Results of a layer's attention. All layers use the same memory.
template <class T>
HeadRows<T> Engine::attended_rows(const AttentionShape& shape) {
    if (shape.latent_dim > 0) return head_rows<T>(attended_, shape.heads, shape.latent_dim);
    const int64_t size = attended_size(shape);
    return {rows_for<T>(attended_.of<T>(readable(rows_) * padded_depth(size)), rows_, size), shape.value_dim()};
}

// Allocates a layer's results and pads them. Padding stays valid, because if heads differ from layer to layer, why_not_native
// allows only sizes without padding.
template <class T>
void Engine::pad_attended(const AttentionShape& shape) {
    const HeadRows<T> attended = attended_rows<T>(shape);
    const int64_t heads = shape.latent_dim > 0 ? shape.heads : 1;
    const int64_t size = shape.latent_dim > 0 ? shape.latent_dim : attended_size(shape);
    for (int64_t row = 0; row < rows_ && padded_depth(size) > size; row++)
        for (int64_t head = 0; head < heads; head++) attended.of(head).pad(row, size);
}

template <class T>
void Engine::make_room_for_latents(const Model& model) {
    for (int32_t index = 0; index < model.layer_count; index++) {
        if (model.layers[index].latent == nullptr) continue;
        const Latent& latent = *model.layers[index].latent;
        const int64_t heads = model.layers[index].head_count;
        head_rows<T>(plain_, heads, latent.plain_dim);
        values_.of<T>(readable(rows_) * padded_depth(heads * latent.value_dim));
        compressed_.of<T>(readable(rows_) * padded_depth(latent.query_rank));
        raised_.of<float>(latent.query_rank > 0 ? rows_ * heads * (latent.plain_dim + latent.turned_dim) : 0);
    }
}

// Writes the rows' latents and rotated keys into their slots, and computes queries in the space of latents.
template <class T>
void Engine::make_latents(int thread, const Model& model, const Layer& layer, const float* qkv, T* queries, T* pages) {
    const Latent& latent = *layer.latent;
    const AttentionShape shape = shape_of(model, layer);
    const int64_t stride = qkv_size(layer), turned = latent.turned_dim;
    const float* raw = qkv;
    int64_t raw_stride = stride;
    if (latent.query_rank > 0) {
        const auto compressed = rows_for<T>(compressed_.of<T>(0), rows_, latent.query_rank);
        for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
            norm_row(qkv + row * stride, latent.query_norm, latent.query_rank, {RMS_NORM, latent.norm_eps},
                     [&](int64_t n) { return compressed.at(row, n); });
            compressed.pad(row, latent.query_rank);
        }
        team.meet();
        float* raised = raised_.of<float>(0);
        raw = raised;
        raw_stride = shape.heads * (latent.plain_dim + turned);
        product<T>(thread, compressed, rows_, latent.query_up, nullptr,
                   [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                       for (int row = 0; row < count; row++)
                           for (int block = 0; block < blocks; block++)
                               store(raised + (first_row + row) * raw_stride + (first_block + block) * LANES,
                                     load(sums + row * PANEL + block * LANES));
                   });
        team.meet();
    }
    const HeadRows<T> plain = head_rows<T>(plain_, shape.heads, latent.plain_dim);
    const float* angles = angles_.of<float>(0) + layer.rotary * rows_ * turned;
    for (int64_t row; (row = team.take_share(thread, rows_)) >= 0;) {
        store_latent(latent, shape, qkv + row * stride + queries_size(latent, shape.heads), angles + row * turned,
                     pages + slot_of_row_[row] * shape.token_stride());
        for (int64_t head = 0; head < shape.heads; head++)
            split_query(latent, raw + row * raw_stride + head * (latent.plain_dim + turned), angles + row * turned,
                        layer.query_factor, plain.of(head), row, query_at(shape, row, head, queries) + shape.latent_dim);
    }
    team.meet();
    const Lanes factor = set(layer.query_factor);
    multiply_heads<T>(team, thread, plain, rows_, shape.heads, static_cast<const T*>(latent.key_up), shape.latent_dim,
                      [&](int64_t head, int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                          for (int row = 0; row < count; row++) {
                              T* to = query_at(shape, first_row + row, head, queries) + first_block * LANES;
                              for (int block = 0; block < blocks; block++)
                                  store(to + block * LANES, mul(load(sums + row * PANEL + block * LANES), factor));
                          }
                      });
}

// Maps the attention's result from latents to values of all heads, side by side.
template <class T>
Rows<const T> Engine::raise_values(int thread, const Model& model, const Layer& layer,
                                   const HeadRows<const T>& attended) {
    const int64_t dim = layer.latent->value_dim, size = layer.head_count * dim;
    const auto values = rows_for<T>(values_.of<T>(0), rows_, size);
    multiply_heads<T>(team, thread, attended, rows_, layer.head_count, static_cast<const T*>(layer.latent->value_up), dim,
                      [&](int64_t head, int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                          for (int row = 0; row < count; row++)
                              for (int block = 0; block < blocks; block++) {
                                  const int64_t n = head * dim + (first_block + block) * LANES;
                                  store(values.at(first_row + row, n), load(sums + row * PANEL + block * LANES));
                                  if (n + LANES == size) values.pad(first_row + row, size);
                              }
                      });
    return values;
}

// after: address that the thread reads after attention.
template <class T>
void Engine::attend(int thread, const AttentionShape& shape, const AttentionPlan& plan, int64_t window,
                    const T* queries, const T* pages, const HeadRows<T>& attended, const void* after) {
    const TinyAreZero tiny_are_zero;
    const PackedScratch<T> scratch(shape, own_[thread].packed.of<T>(PackedScratch<T>::packed_count(shape)),
                                   own_[thread].floats.of<float>(PackedScratch<T>::float_count(shape)));
    float* partials = partials_.of<float>(0);
    const auto partial_at = [&](int64_t row, int64_t part) {
        return partials + (plan.parts[row].place + part - plan.parts[row].first) * partial_count(shape);
    };
    // The thread that writes the last part of a row joins all parts.
    const auto count_write = [&](int64_t row) {
        if (parts_done_[row].fetch_add(1) + 1 != plan.parts[row].writes) return;
        parts_done_[row].store(0);
        join_parts(shape, partial_at(row, plan.parts[row].first), plan.parts[row].count, attended, row);
    };
    const int64_t count = int64_t(plan.pieces.size());
    int64_t index = team.take();
    // DIRECT pieces come last.
    for (; index < count && plan.pieces[index].kind != AttentionPiece::DIRECT; index = team.take()) {
        const AttentionPiece& piece = plan.pieces[index];
        const Chunk& chunk = plan.chunks[piece.chunk];
        if (piece.kind == AttentionPiece::PROMPT) {
            attend_prompt(shape, chunk, piece, window, queries, rows_, pages, attended, scratch);
            continue;
        }
        const int32_t* sharers = plan.sharers.data() + piece.sharers_first;
        attend_shared(shape, chunk, piece, sharers, queries, rows_, pages, scratch, partial_at,
                      [&](int64_t row) { return plan.parts[row].position; });
        for (int32_t sharer = 0; sharer < piece.sharer_count; sharer++) count_write(sharers[sharer]);
    }
    if (index >= count) return;
    configure_row_tiles();
    Fetch fetch(shape, pages, shape.token_stride() * (shape.is_coded() ? 1 : int64_t(sizeof(T))), after);
    for (int64_t next; index < count; index = next) {
        const AttentionPiece& piece = plan.pieces[index];
        const Chunk& chunk = plan.chunks[piece.chunk];
        next = team.take();  // taken early, so that it can be prefetched
        if (next < count)
            fetch.begin_piece(chunk, piece, &plan.chunks[plan.pieces[next].chunk], &plan.pieces[next]);
        else
            fetch.begin_piece(chunk, piece, nullptr, nullptr);
        const int64_t row = chunk.first_row + piece.token;
        AttentionPiece part = piece;
        for (part.from = piece.from; part.from < piece.to; part.from = part.to) {
            part.to = std::min((part.from / PART_TOKENS + 1) * PART_TOKENS, piece.to);
            float* partial = partial_at(row, part.from / PART_TOKENS);
            attend_part(shape, chunk, part, queries, rows_, pages, partial, fetch, own_[thread].memory);
        }
        count_write(row);
    }
    configure_tiles();
}

// The product of the model's head: for each row the best id of this thread's pieces, a doubt about non-finite logits, and the
// logits of rows that keep them.
template <class T>
void Engine::choose(int thread, const Model& model, const Rows<const T>& normed, int64_t rows) {
    Own& own = own_[thread];
    float* best_values = own.best_values.of<float>(rows);
    int32_t* best_ids = own.best_ids.of<int32_t>(rows);
    float* doubts = own.doubts.of<float>(rows * LANES);
    std::fill(best_values, best_values + rows, -std::numeric_limits<float>::infinity());
    std::fill(best_ids, best_ids + rows, std::numeric_limits<int32_t>::max());
    std::fill(doubts, doubts + rows * LANES, 0.0f);
    const int64_t vocab = model.vocab_count, vocab_first = model.vocab_first;
    const bool changes_logits = model.logit_scale != 1.0f || model.logit_cap > 0 || model.head_bias != nullptr;
    // Same as the cap of a score with scale 1.
    const ScoreCap cap(model.logit_cap, 1.0f);
    product(thread, normed, rows, model.head, nullptr,
            [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                const int64_t first_id = first_block * LANES;
                const int ids = int(std::min<int64_t>(blocks * LANES, vocab - first_id));
                for (int row = 0; row < count; row++) {
                    float* values = sums + row * PANEL;
                    for (int block = 0; changes_logits && block < blocks; block++) {
                        Lanes logit = load(values + block * LANES);
                        if (model.head_bias != nullptr) logit = add(logit, load(model.head_bias + first_id + block * LANES));
                        const Lanes scaled = mul(logit, set(model.logit_scale));
                        store(values + block * LANES, cap.is_there() ? cap.of(scaled) : scaled);
                    }
                    float* logits = logits_of_row_[first_row + row];
                    if (logits != nullptr) std::memcpy(logits + vocab_first + first_id, values, sizeof(float) * ids);
                    float* doubt = doubts + (first_row + row) * LANES;
                    Lanes best = set(-std::numeric_limits<float>::infinity());
                    for (int block = 0; block < blocks; block++) {
                        float* part = values + block * LANES;
                        // Only NaN or infinity times 0 is NaN. Padding is 0.
                        store(doubt, fma(load(part), zero(), load(doubt)));
                        for (int id = std::max(ids - block * LANES, 0); id < LANES; id++)
                            part[id] = -std::numeric_limits<float>::infinity();
                        best = max(best, load(part));
                    }
                    const float value = max_of(best);
                    if (value < best_values[first_row + row]) continue;
                    for (int id = 0; id < ids; id++) {
                        if (values[id] != value) continue;
                        const int32_t token = int32_t(vocab_first + first_id + id);
                        if (value > best_values[first_row + row] || token < best_ids[first_row + row]) {
                            best_values[first_row + row] = value;
                            best_ids[first_row + row] = token;
                        }
                        break;
                    }
                }
            });
}

// One thread calls this function. It sums the parts of all ranks, and shares is_abandoned. count may be 0.
void Engine::add_up_ranks(const Collectives& ranks, const float* part, int64_t count, bool is_abandoned, float* total) {
    if (ranks.sum(ranks.context, part, count, is_abandoned, total) != 0) is_abandoned_ = true;
    if (room_ != nullptr) room_ = ranks.room(ranks.context, room_count_);
}

// Returns the best choice of all threads for a row.
Engine::Choice Engine::own_choice(int64_t row) {
    Choice choice{MINUS_INFINITY, std::numeric_limits<int32_t>::max(), 1};
    float doubt = 0;
    for (Own& own : own_) {
        choice.take({own.best_values.of<float>(0)[row], own.best_ids.of<int32_t>(0)[row], 1});
        for (int lane = 0; lane < LANES; lane++) doubt += own.doubts.of<float>(0)[row * LANES + lane];
    }
    choice.is_finite = doubt == 0.0f;
    return choice;
}

// Called before the threads start. Allocates memory for other ranks' choices and logits. kept: number of rows with logits.
void Engine::prepare_choices(const Model& model, int64_t rows, int64_t kept) {
    choices_.resize(rows);
    if (model.collectives == nullptr) return;
    const Collectives& ranks = *model.collectives;
    all_choices_.resize(rows * ranks.size);
    if (kept == 0) return;
    if (vocab_counts_.empty()) {
        vocab_counts_.resize(ranks.size);
        ranks.gather(ranks.context, &model.vocab_count, sizeof model.vocab_count, vocab_counts_.data());
    }
    logits_of_ranks_.of<float>(ranks.size * int64_t(*std::max_element(vocab_counts_.begin(), vocab_counts_.end())));
}

// One thread calls this function after all have chosen. Then choices_ cover the whole vocabulary, and own rows have all logits.
void Engine::settle_choices(const Model& model, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) choices_[row] = own_choice(row);
    if (model.collectives == nullptr) return;
    const Collectives& ranks = *model.collectives;
    ranks.gather(ranks.context, choices_.data(), sizeof(Choice) * rows, all_choices_.data());
    for (int64_t row = 0; row < rows; row++)
        for (int32_t rank = 0; rank < ranks.size; rank++) choices_[row].take(all_choices_[rank * rows + row]);
    float* parts = logits_of_ranks_.of<float>(0);
    for (int64_t row = 0; row < rows; row++) {
        float* logits = logits_of_row_[row];
        if (logits == nullptr) continue;
        const int64_t count_max = *std::max_element(vocab_counts_.begin(), vocab_counts_.end());
        const bool is_own = is_own_row(model, row);
        ranks.gather(ranks.context, logits + model.vocab_first, sizeof(float) * count_max, is_own ? parts : nullptr);
        for (int32_t rank = 0; is_own && rank < ranks.size; logits += vocab_counts_[rank++])
            std::memcpy(logits, parts + rank * count_max, sizeof(float) * vocab_counts_[rank]);
    }
}

// Allocates memory for exchange_rows(), because a thread cannot report a failure. width: numbers of all columns.
void Engine::prepare_exchange(const Collectives* ranks, int64_t rows, int64_t width) {
    if (ranks != nullptr) exchanged_.of<char>((ranks->size + 1) * rows * width * sizeof(int32_t));
}

// Called by one thread. Each row gets the columns of the rank that owns it.
void Engine::exchange_rows(const Collectives& ranks, int64_t rows, std::initializer_list<Column> columns) {
    int64_t row_bytes = 0;
    for (const Column& column : columns) row_bytes += column.width * sizeof(int32_t);
    char *own = exchanged_.of<char>(0), *all = own + rows * row_bytes;
    // copy(address of the row here, address in the exchanged row, bytes)
    const auto go_through = [&](int64_t row, char* place, const auto& copy) {
        for (const Column& column : columns) {
            const int64_t bytes = column.width * sizeof(int32_t);
            copy(static_cast<char*>(column.numbers) + row * bytes, place, bytes);
            place += bytes;
        }
    };
    for (int64_t row = 0; row < rows; row++)
        go_through(row, own + row * row_bytes, [](char* here, char* there, int64_t bytes) { std::memcpy(there, here, bytes); });
    ranks.gather(ranks.context, own, rows * row_bytes, all);
    for (int64_t row = 0; row < rows; row++)
        go_through(row, all + (row % ranks.size * rows + row) * row_bytes,
                   [](char* here, char* there, int64_t bytes) { std::memcpy(here, there, bytes); });
}

// Allocates memory for sample(), because a thread cannot report a failure.
void Engine::prepare_sampling(int64_t vocab) {
    const int64_t padded = rounded_up(vocab, LANES);
    for (Own& own : own_) {
        own.scores.of<float>(padded);
        own.weights.of<float>(padded);
        own.work.of<float>(padded);
        own.marks.of<int32_t>(padded);
        own.allowed.of<int32_t>(padded);
    }
}

// Waits for the masks if the row has one. Returns false if the step is abandoned.
bool Engine::can_sample(const Step& step, int64_t row) {
    if (step.samplings[row].mask == nullptr || wait_for_masks(step.masks_filled, step.waited_for)) return true;
    is_abandoned_ = true;
    return false;
}

// logits: finite logits of the row.
void Engine::sample(int thread, const Step& step, int64_t row, int64_t vocab, const float* logits) {
    const TinyAreZero tiny_are_zero;  // weights that far below the best one's 1 do not affect the draw
    const Sampling& sampling = step.samplings[row];
    Own& own = own_[thread];
    const SamplingScratch scratch{own.scores.of<float>(0), own.weights.of<float>(0), own.work.of<float>(0),
                                  own.marks.of<int32_t>(0), own.allowed.of<int32_t>(0)};
    int32_t* token = step.next_ids + row;
    step.flaws[row] = sample_row(sampling, logits, vocab, step.sampling_ids + sampling.ids_first,
                                 step.sampling_biases + sampling.biases_first, scratch, token);
    if (sampling.wants_logprobs && step.flaws[row] == NO_FLAW)
        write_logprobs(logits, vocab, *token, sampling.top_count, scratch.weights,
                       step.logprobs + row * (1 + step.top_count_max), step.top_ids + row * step.top_count_max);
}

template <class T>
bool Engine::compute(const Model& model, const Step& step) {
    plan_rows(model, step);
    is_abandoned_ = false;
    const int64_t rows = rows_, hidden_size = model.hidden_size, middle = model.intermediate_size;
    int64_t qkv_size_max = 0, attended_size_max = 0, queries_max = 0, gate_size_max = 0;
    int64_t input_size_max = std::max(hidden_size, middle);  // largest inputs of products
    for (int32_t index = 0; index < model.layer_count; index++) {
        const Layer& layer = model.layers[index];
        if (!attends(layer)) continue;
        const AttentionShape shape = shape_of(model, layer);
        qkv_size_max = std::max(qkv_size_max, qkv_size(layer));
        attended_size_max = std::max(attended_size_max, attended_size(shape));
        queries_max = std::max(queries_max, (rows * shape.heads + 32) * shape.query_stride());
        if (layer.attention_gate != nullptr) gate_size_max = std::max(gate_size_max, gate_stride(layer, shape));
        pad_attended<T>(shape);
        if (layer.latent == nullptr) continue;
        input_size_max = std::max<int64_t>(input_size_max, layer.head_count * layer.latent->value_dim);
        input_size_max = std::max<int64_t>(input_size_max, layer.latent->query_rank);
    }
    input_size_max = std::max(input_size_max, attended_size_max);
    for (int32_t index = 0; index < model.layer_count; index++)
        if (model.layers[index].laurel != nullptr)
            input_size_max = std::max<int64_t>(input_size_max, model.layers[index].laurel->rank);
    if (model.streams != nullptr) input_size_max = std::max<int64_t>(input_size_max, model.streams->input_size);
    const int64_t sampled = step.sampled_count;
    float* hidden = hidden_.of<float>(rows * hidden_size);
    T* normed = normed_.of<T>(readable(rows) * padded_depth(hidden_size));
    const bool has_normed = has_layer(model, has_normed_experts), has_beside = has_normed || has_layer(model, has_own_mlp_norm);
    const auto beside =
        rows_for<T>(beside_.of<T>(has_beside ? readable(rows) * padded_depth(hidden_size) : 0), rows, hidden_size);
    shared_.of<float>(has_normed ? rows * hidden_size : 0);
    float* qkv = qkv_.of<float>(rows * qkv_size_max);
    T* queries = queries_.of<T>(queries_max);
    make_room_for_latents<T>(model);
    activated_.of<T>(readable(rows) * padded_depth(middle));
    int64_t recurrent_size = 0;
    for (int32_t index = 0; index < model.layer_count; index++)
        if (const Recurrent* layer = model.layers[index].recurrent)
            recurrent_size = std::max(recurrent_size, inner_size(*layer));
    T* recurrent = recurrent_.of<T>(recurrent_size > 0 ? readable(rows) * padded_depth(recurrent_size) : 0);
    make_room_for_states<T>(model);
    make_room_for_streams<T>(model);
    attention_gates_.of<float>(rows * gate_size_max);
    quantized_.of<int8_t>(quantized_rows_bytes(rows, std::max(input_size_max, recurrent_size)));
    angles_.of<float>(model.rotary_count * rows * model.turned_dim);
    float* outputs = product_.of<float>(has_layer(model, has_output_norm) ? rows * hidden_size : 0);
    const Norm norm{model.norm_kind, model.norm_eps};
    make_room_for_experts<T>(model);
    adapters_.plan<T>(step.adapters, chunk_of_row_, model.layer_count, team.thread_count(),
                      padded_depth(std::max({hidden_size, attended_size_max, middle})));
    float* sampled_hidden = sampled_.of<float>(sampled * hidden_size);
    int64_t kept_count = 0;
    for (int64_t row = 0; row < sampled; row++) kept_count += step.samplings[row].needs_logits != 0;
    if (kept_count > 0) prepare_sampling(model.vocab_size);
    prepare_choices(model, sampled, kept_count);
    prepare_exchange(model.collectives, kept_count > 0 ? sampled : 0, 3 + 2 * int64_t(step.top_count_max));
    float* logits = logits_.of<float>((kept_count + 1) * model.vocab_size);  // one more: ranks read beyond a row's end
    logits_of_row_.assign(sampled, nullptr);
    for (int64_t row = 0; row < sampled; row++) {
        if (!step.samplings[row].needs_logits) continue;
        logits_of_row_[row] = logits;
        logits += model.vocab_size;
    }

    const bool has_streams = model.streams != nullptr && model.streams->count > 1;
    const Collectives* ranks = model.collectives;
    room_count_ = rows * hidden_size;
    room_ = ranks == nullptr ? nullptr : ranks->room(ranks->context, room_count_);
    const bool has_masks = std::any_of(step.samplings, step.samplings + sampled, [](const Sampling& of) { return of.mask != nullptr; });
    const auto work = [&](int thread) {
        configure_tiles();
        const bool is_first = is_first_rank(model);
        const auto is_given_up = [&] {
            return step.waited_for != nullptr && __atomic_load_n(step.waited_for, __ATOMIC_RELAXED) == 0;
        };
        // Where this rank's part of a total is written.
        const auto place_of_part = [&](float* total) { return room_ != nullptr ? room_ : total; };
        const auto add_up = [&](const float* part, float* total) {
            if (thread == 0) add_up_ranks(*ranks, part, rows * hidden_size, is_given_up(), total);
            team.meet();
        };
        float* embedded = ranks == nullptr ? hidden : place_of_part(hidden);
        embed<T>(thread, model, step, embedded);
        team.meet();
        if (ranks != nullptr) add_up(embedded, hidden);
        if (model.embedding_norm != nullptr) {
            for (int64_t row; (row = team.take_share(thread, rows)) >= 0;) {
                float* embedding = hidden + row * hidden_size;
                norm_row(embedding, model.embedding_norm, hidden_size, norm, [=](int64_t n) { return embedding + n; });
            }
            team.meet();
        }
        if (model.streams != nullptr) begin_streams(thread, model, step, hidden, normed);
        // to = base + scale * sums. A null base is zeros. base may be `to`.
        const auto add_scaled = [&](const float* bias, float scale, const float* base, float* to) {
            return [=](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                for (int row = 0; row < count; row++) {
                    for (int block = 0; block < blocks; block++) {
                        const int64_t n = (first_block + block) * LANES, place = (first_row + row) * hidden_size + n;
                        Lanes value = load(sums + row * PANEL + block * LANES);
                        if (bias != nullptr) value = add(value, load(bias + n));
                        _mm_prefetch(to + place + 4 * hidden_size, _MM_HINT_T0);  // used with the next rows
                        store(to + place, fma(value, set(scale), base == nullptr ? zero() : load(base + place)));
                    }
                }
            };
        };
        const bool is_adapted = adapters_.are_there();
        const auto lower = [&](const Rows<const T>& x, AdapterOf which, int32_t index) {
            if (!is_adapted) return;
            adapters_.lower<T>(team, thread, x, which, index);
            team.meet();
        };
        const auto adapted = [&](AdapterOf which, int32_t index, const auto& finish) {
            return [this, is_adapted, which, index, &finish](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                if (is_adapted) adapters_.add_to<T>(which, index, first_row, count, first_block, blocks, sums);
                finish(first_row, count, first_block, blocks, sums);
            };
        };
        // Adds what images give to the output of a layer.
        const auto add_given = [&](int32_t index) {
            if ((index + 2) * hidden_size > step.given_width) return;
            for (int64_t row; (row = team.take_share(thread, rows)) >= 0;) {
                if (given_of_row_[row] == nullptr) continue;
                const float* given = given_of_row_[row] + (index + 1) * hidden_size;
                float* to = hidden + row * hidden_size;
                for (int64_t n = 0; n < hidden_size; n += LANES) store(to + n, add(load(to + n), load(given + n)));
            }
            team.meet();
        };
        bool has_shortcut = false;  // true between a layer with a shortcut and the layer that adds its result
        for (int32_t index = 0; index < model.layer_count; index++) {
            const Layer& layer = model.layers[index];
            T* pages = static_cast<T*>(step.pages[index]);
            const AttentionShape shape = shape_of(model, layer);
            if (index > 0) add_given(index - 1);
            // If the parts of attention and MLP are added at the same time, one sum of ranks is enough. If a norm follows, it
            // applies to the sum of the parts. Otherwise the first rank adds its part to the hidden state, and the other
            // ranks add theirs to zeros.
            const bool sums_mlp = layer.sums_mlp && has_mlp(layer);
            const bool sums_later = layer.sums_attention && sums_mlp && layer.is_parallel && layer.mlp_output_norm == nullptr;
            if (thread == 0 && ranks == nullptr) is_abandoned_ = is_given_up();
            if (thread == 0 && ranks != nullptr && !layer.sums_attention && !sums_mlp)
                add_up_ranks(*ranks, nullptr, 0, is_given_up(), nullptr);
            const bool is_normed = layer.attention_output_norm != nullptr;
            float* mixed_total = is_normed ? outputs : hidden;
            float* mixed_part = layer.sums_attention ? place_of_part(mixed_total) : mixed_total;
            const float* mixed_base = is_normed || (layer.sums_attention && !is_first) ? nullptr : hidden;
            const float mixed_scale = is_normed ? 1.0f : layer.residual_scale;
            if (has_streams) predict_streams(thread, model, layer, hidden);
            if (thread == 0 && step.tapped != nullptr && step.tapped[index] != nullptr)
                std::memcpy(step.tapped[index], hidden, sizeof(float) * rows * hidden_size);
            Rows<const T> x = {};
            if (attends(layer) || layer.recurrent != nullptr)
                x = norm_rows(thread, hidden, rows, hidden_size, layer.attention_norm, norm, normed);
            const bool has_own_norm = has_own_mlp_norm(layer);
            for (int64_t row; has_own_norm && (row = team.take_share(thread, rows)) >= 0;) {
                norm_row(hidden + row * hidden_size, layer.mlp_norm, hidden_size, norm,
                         [&](int64_t n) { return beside.at(row, n); });
                beside.pad(row, hidden_size);
            }
            if (has_own_norm) team.meet();
            const Matrix& after = first_of_mlp(layer);
            if (layer.laurel != nullptr) make_laurel(thread, *layer.laurel, x, hidden_size);
            if (layer.recurrent != nullptr) {
                const Recurrent& recurring = *layer.recurrent;
                float* projected = projected_.of<float>(0);
                const int64_t stride = projected_stride(recurring);
                product(thread, x, rows, recurring.input, nullptr,
                        [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                            for (int row = 0; row < count; row++) {
                                for (int block = 0; block < blocks && (first_block + block) * LANES < stride; block++) {
                                    const int64_t n = (first_block + block) * LANES;
                                    Lanes value = load(sums + row * PANEL + block * LANES);
                                    if (recurring.input_bias != nullptr) value = add(value, load(recurring.input_bias + n));
                                    store(projected + (first_row + row) * stride + n, value);
                                }
                            }
                        });
                team.meet();
                if (is_abandoned_) return;
                const auto mixed = rows_for<T>(recurrent, rows, inner_size(recurring));
                recur<T>(thread, step, recurring, model.norm_eps, step.states[index], mixed);
                const Rows<const T> given = mixed;
                product<T>(thread, given, rows, recurring.output,
                           first_read<T>(thread, attends(layer) ? layer.qkv : after, rows),
                           add_scaled(recurring.output_bias, mixed_scale, mixed_base, mixed_part));
                team.meet();
            }
            if (layer.attention_gate != nullptr) {
                product<T>(thread, x, rows, *layer.attention_gate, nullptr,
                           kept_in(attention_gates_.of<float>(0), gate_stride(layer, shape)));
                team.meet();
            }
            if (!attends(layer)) {
                // The sum is already complete.
            } else if (layer.pairs_together && !shape.is_coded()) {
                lower(x, &AdapterLayer::qkv, index);
                const auto turn = [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                    turn_and_store(model, layer, sums, first_row, count, first_block, blocks, queries, pages);
                };
                product(thread, x, rows, layer.qkv, nullptr, adapted(&AdapterLayer::qkv, index, turn));
            } else {
                const int64_t size = qkv_size(layer);
                lower(x, &AdapterLayer::qkv, index);
                const auto keep = [&](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
                    for (int row = 0; row < count; row++) {
                        for (int block = 0; block < blocks; block++) {
                            const int64_t n = (first_block + block) * LANES;
                            Lanes value = load(sums + row * PANEL + block * LANES);
                            if (layer.qkv_bias != nullptr) value = add(value, load(layer.qkv_bias + n));
                            store(qkv + (first_row + row) * size + place_in_qkv(shape, layer, n), clipped(layer, value));
                        }
                    }
                };
                product(thread, x, rows, layer.qkv, nullptr, adapted(&AdapterLayer::qkv, index, keep));
                team.meet();
                if (layer.latent != nullptr)
                    make_latents(thread, model, layer, qkv, queries, pages);
                else
                    for (int64_t row; (row = team.take_share(thread, rows)) >= 0;)
                        turn_and_store(model, layer, qkv, row, queries, pages);
            }
            if (attends(layer)) {
                team.meet();
                if (is_abandoned_) return;
                const HeadRows<T> attended = attended_rows<T>(shape);
                attend<T>(thread, shape, plans_.at(plan_key(layer)), layer.window, queries, pages, attended,
                          first_read<T>(thread, layer.output, rows));
                team.meet();
                if (layer.attention_gate != nullptr) {
                    gate_attended(thread, layer, shape, attended.rows);
                    team.meet();
                }
                Rows<const T> found = attended.rows;
                if (layer.latent != nullptr) {
                    found = raise_values<T>(thread, model, layer, attended);
                    team.meet();
                }
                lower(found, &AdapterLayer::output, index);
                const auto add_attended = add_scaled(layer.output_bias, mixed_scale,
                                                     layer.recurrent == nullptr ? mixed_base : mixed_part, mixed_part);
                product<T>(thread, found, rows, layer.output, first_read<T>(thread, after, rows),
                           adapted(&AdapterLayer::output, index, add_attended));
                team.meet();
            }
            if (layer.sums_attention && !sums_later) add_up(mixed_part, mixed_total);
            if (is_normed)
                add_normed(thread, outputs, rows, hidden_size, layer.attention_output_norm, norm, layer.residual_scale,
                           hidden);
            if (layer.laurel != nullptr) add_laurel(thread, *layer.laurel, x, hidden_size, norm, hidden);
            if (!has_mlp(layer)) continue;
            const bool is_mlp_normed = layer.mlp_output_norm != nullptr;
            const float total_scale = layer.streams == nullptr ? scale_of(layer) : 1.0f;  // else streams apply it
            float* total = is_mlp_normed ? outputs : hidden;
            float* part = sums_later ? mixed_part : sums_mlp ? place_of_part(total) : total;
            const float* base = sums_later ? mixed_part : is_mlp_normed || (sums_mlp && !is_first) ? nullptr : hidden;
            if (!layer.is_parallel) x = norm_rows(thread, hidden, rows, hidden_size, layer.mlp_norm, norm, normed);
            if (has_own_norm) x = beside;
            if (layer.experts != nullptr) {
                mix(thread, model, layer, *layer.experts, hidden, x, base, part);
                if (sums_mlp) add_up(part, total);
                if (is_mlp_normed)
                    add_normed(thread, outputs, rows, hidden_size, layer.mlp_output_norm, norm, layer.residual_scale,
                               hidden, total_scale);
                if (layer.streams != nullptr) correct_streams(thread, model, index, hidden, outputs, normed);
                continue;
            }
            if (layer.shortcut != nullptr) {
                mix(thread, model, layer, *layer.shortcut, hidden, x, nullptr, shortcut_.of<float>(0));
                has_shortcut = true;
            }
            const int64_t own_middle = outputs_of(layer, layer.gate_up);
            const auto activated = rows_for<T>(activated_.of<T>(0), rows, own_middle);
            lower(x, &AdapterLayer::gate_up, index);
            gate(thread, x, rows, layer.gate_up, layer.gate_up_bias, layer, activated,
                 first_read<T>(thread, layer.down, rows), is_adapted ? index : -1);
            team.meet();
            lower(activated, &AdapterLayer::down, index);
            const uint8_t* next = nullptr;
            if (index + 1 < model.layer_count)
                next = first_read<T>(thread, first_matrix(model.layers[index + 1]), rows);
            else if (sampled > 0)
                next = first_read<T>(thread, model.head, sampled);
            const auto add_activated = add_scaled(layer.down_bias, is_mlp_normed ? 1.0f : layer.residual_scale, base, part);
            product<T>(thread, activated, rows, layer.down, next, adapted(&AdapterLayer::down, index, add_activated));
            team.meet();
            if (has_shortcut && layer.shortcut == nullptr) {
                const float* from = shortcut_.of<float>(0);
                for (int64_t row; (row = team.take_share(thread, rows)) >= 0;)
                    for (int64_t n = row * hidden_size; n < (row + 1) * hidden_size; n += LANES)
                        store(part + n, add(load(part + n), load(from + n)));
                has_shortcut = false;
                team.meet();
            }
            if (sums_mlp) add_up(part, total);
            if (is_mlp_normed)
                add_normed(thread, outputs, rows, hidden_size, layer.mlp_output_norm, norm, layer.residual_scale, hidden,
                           total_scale);
            if (layer.streams != nullptr) correct_streams(thread, model, index, hidden, outputs, normed);
        }
        add_given(model.layer_count - 1);
        if (has_streams) end_streams(thread, model, hidden, outputs, normed);
        if (sampled == 0) return;
        if (thread == 0)
            for (int64_t index = 0; index < sampled; index++)
                std::memcpy(sampled_hidden + index * hidden_size, hidden + step.sampled_rows[index] * hidden_size,
                            sizeof(float) * hidden_size);
        team.meet();
        const Rows<const T> x = norm_rows(thread, sampled_hidden, sampled, hidden_size, model.norm, norm, normed);
        choose(thread, model, x, sampled);
        team.meet();
        if (thread == 0) {
            settle_choices(model, sampled);
            if (ranks != nullptr && has_masks)
                add_up_ranks(*ranks, nullptr, 0, !wait_for_masks(step.masks_filled, step.waited_for), nullptr);
        }
        team.meet();
        if (is_abandoned_) return;
        for (int64_t row; (row = team.take()) < sampled && can_sample(step, row);) {
            const Sampling& sampling = step.samplings[row];
            const Choice& choice = choices_[row];
            if (sampling.needs_logits && !is_own_row(model, row)) continue;
            if (!choice.is_finite) {
                step.flaws[row] = NOT_FINITE;
            } else if (sampling.mask != nullptr && is_largest_wanted(sampling) && is_allowed(sampling.mask, choice.token)) {
                step.flaws[row] = NO_FLAW;
                step.next_ids[row] = choice.token;
            } else if (sampling.needs_logits) {
                sample(thread, step, row, model.vocab_size, logits_of_row_[row]);
            } else {
                step.flaws[row] = NO_FLAW;
                step.next_ids[row] = choice.token;
            }
        }
        if (ranks == nullptr || kept_count == 0) return;
        team.meet();
        if (thread == 0)
            exchange_rows(*ranks, sampled, {{step.next_ids, 1}, {step.flaws, 1}, {step.logprobs, 1 + step.top_count_max},
                                            {step.top_ids, step.top_count_max}});
    };
    team.run(work);
    if (is_abandoned_) return false;
    if (step.hidden != nullptr) std::memcpy(step.hidden, hidden, sizeof(float) * rows * hidden_size);
    return true;
}

template <class T>
bool Engine::compute_logprobs(const Model& model, const float* hidden, int64_t rows, const int32_t* targets,
                              int32_t top_count, float* logprobs, int32_t* top_ids) {
    const int64_t vocab = model.vocab_size;
    T* normed = normed_.of<T>(readable(rows) * padded_depth(model.hidden_size));
    prepare_choices(model, rows, rows);
    prepare_exchange(model.collectives, rows, 1 + 2 * int64_t(top_count));
    float* logits = logits_.of<float>((rows + 1) * vocab);  // one more: ranks read beyond a row's end
    logits_of_row_.resize(rows);
    for (int64_t row = 0; row < rows; row++) logits_of_row_[row] = logits + row * vocab;
    prepare_sampling(vocab);
    std::atomic<bool> are_finite{true};
    quantized_.of<int8_t>(quantized_rows_bytes(rows, model.hidden_size));
    team.run([&](int thread) {
        configure_tiles();
        const Norm norm{model.norm_kind, model.norm_eps};
        choose(thread, model, norm_rows(thread, hidden, rows, model.hidden_size, model.norm, norm, normed), rows);
        team.meet();
        if (thread == 0) settle_choices(model, rows);
        team.meet();
        float* weights = own_[thread].weights.of<float>(0);
        for (int64_t row; (row = team.take()) < rows;) {
            if (!choices_[row].is_finite)
                are_finite = false;
            else if (is_own_row(model, row))
                write_logprobs(logits_of_row_[row], vocab, targets[row], top_count, weights,
                               logprobs + row * (1 + top_count), top_ids + row * top_count);
        }
        if (model.collectives == nullptr) return;
        team.meet();
        if (thread == 0) exchange_rows(*model.collectives, rows, {{logprobs, 1 + top_count}, {top_ids, top_count}});
    });
    return are_finite;
}

void Engine::compute_sampling(const Step& step, int64_t vocab, const float* logits) {
    prepare_sampling(vocab);
    team.run([&](int thread) {
        for (int64_t row; (row = team.take()) < step.sampled_count && can_sample(step, row);)
            sample(thread, step, row, vocab, logits + row * vocab);
    });
}

template <class T>
void Engine::compute_attention(const Model& model, const Step& step, const T* queries, T* attended) {
    plan_rows(model, step);
    const AttentionShape shape = shape_of(model, model.layers[0]);
    const int64_t dim = shape.head_dim, value_dim = shape.value_dim(), group = shape.group(), size = shape.heads * dim;
    const Layer& layer = model.layers[0];
    T* ordered = queries_.of<T>((rows_ * shape.heads + 32) * shape.query_stride());
    const HeadRows<T> found = attended_rows<T>(shape);
    // In a model, padding stays valid. Here, every call may have another shape.
    std::memset(ordered, 0, sizeof(T) * (rows_ * shape.heads + 32) * shape.query_stride());
    for (int64_t row = 0; row < rows_; row++)
        for (int64_t head = 0; head < shape.heads; head++)
            std::memcpy(ordered + ((head / group * rows_ + row) * group + head % group) * shape.query_stride(),
                        queries + row * size + head * dim, sizeof(T) * dim);
    team.run([&](int thread) {
        configure_tiles();
        attend<T>(thread, shape, plans_.at(plan_key(layer)), layer.window, ordered, static_cast<const T*>(step.pages[0]),
                  found, nullptr);
    });
    for (int64_t row = 0; row < rows_; row++)
        for (int64_t head = 0; head < shape.heads; head++)
            for (int64_t d = 0; d < value_dim; d += LANES)
                std::memcpy(attended + (row * shape.heads + head) * value_dim + d, found.at(row, head, d), sizeof(T) * LANES);
}

template <class T>
void Engine::compute_product(const T* x, int64_t m, const Matrix& weight, int64_t n, float* y) {
    const int64_t k = weight.parts[0].inputs, depth = padded_depth(k);
    quantized_.of<int8_t>(quantized_rows_bytes(m, k));
    const auto rows = rows_for<T>(normed_.of<T>(readable(m) * depth), m, k);
    for (int64_t row = 0; row < m; row++)
        for (int64_t n = 0; n < depth; n += LANES) std::memcpy(rows.at(row, n), x + row * depth + n, sizeof(T) * LANES);
    team.run([&](int thread) {
        configure_tiles();
        product<T>(thread, rows, m, weight, nullptr, [=](int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
            const int64_t column = first_block * LANES, width = std::min<int64_t>(blocks * LANES, n - column);
            for (int row = 0; row < count; row++)
                std::memcpy(y + (first_row + row) * n + column, sums + row * PANEL, sizeof(float) * width);
        });
    });
}

Engine* make_engine(int thread_count) { return new Engine(thread_count); }
void close_engine(Engine* engine) { delete engine; }

bool run_step(Engine& engine, const Model& model, const Step& step) {
    engine.make_invariant(model.batch_invariant != 0);
    return model.dtype == BFLOAT16 ? engine.compute<bf16>(model, step) : engine.compute<float>(model, step);
}

bool run_logprobs(Engine& engine, const Model& model, const float* hidden, int64_t rows, const int32_t* targets,
                  int32_t top_count, float* logprobs, int32_t* top_ids) {
    engine.make_invariant(model.batch_invariant != 0);
    return model.dtype == BFLOAT16
               ? engine.compute_logprobs<bf16>(model, hidden, rows, targets, top_count, logprobs, top_ids)
               : engine.compute_logprobs<float>(model, hidden, rows, targets, top_count, logprobs, top_ids);
}

void run_sampling(Engine& engine, const Step& step, int64_t vocab, const float* logits) {
    engine.compute_sampling(step, vocab, logits);
}

void run_attention(Engine& engine, const Model& model, const Step& step, const void* queries, void* attended) {
    engine.make_invariant(model.batch_invariant != 0);
    if (model.dtype == BFLOAT16)
        engine.compute_attention(model, step, static_cast<const bf16*>(queries), static_cast<bf16*>(attended));
    else
        engine.compute_attention(model, step, static_cast<const float*>(queries), static_cast<float*>(attended));
}

void run_product(Engine& engine, DtypeName dtype, bool batch_invariant, const void* x, int64_t m, const Matrix& weight,
                 int64_t n, float* y) {
    engine.make_invariant(batch_invariant);
    if (dtype == BFLOAT16)
        engine.compute_product(static_cast<const bf16*>(x), m, weight, n, y);
    else
        engine.compute_product(static_cast<const float*>(x), m, weight, n, y);
}

}  // namespace trioserve
