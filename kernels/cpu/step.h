// One forward pass of a decoder-only model over the paged KV cache, and what it needs to know. The structs are those of
// native.py, field by field.
#pragma once

#include <cstdint>

#include "adapters.h"
#include "collectives.h"
#include "sampling.h"
#include "team.h"

namespace trioserve {

enum DtypeName : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };
enum NormKind : int32_t { RMS_NORM = 0, LAYER_NORM = 1 };
enum QkNorm : int32_t { NO_QK_NORM = 0, HEAD_NORM = 1, HEADS_NORM = 2, ROW_NORM = 3 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

// Some of a matrix's outputs, 16 to a block. format: a WeightFormat of quantized.h; DENSE is the model's dtype.
struct WeightPart {
    const void* data;
    int32_t first_block, block_count, format, inputs;
};

// A part without blocks is not there.
struct Matrix {
    WeightPart parts[4];
};

enum Scoring : int32_t { SOFTMAX = 0, SIGMOID = 1 };

// A mixture of experts: each row is sent to the per_token best ones. normalizes: their scores are divided by their sum; then
// they are multiplied with scale. score_bias: [count], added to what chooses, or null. They are chosen from the
// groups_per_token best of group_count groups, which count by the sum of their group_leaders best. gate_up, down:
// [own_count], as of a layer; middle: an expert's intermediate size. shared_gate_up, shared_down: of what all rows go through; without
// blocks there is none. shared_gate: [hidden_size], or null. Of the experts, own_count are here from own_first on, and gate_up,
// down and their biases are theirs; the others are other ranks'. Biases, which may be null: router_bias [count], gate_up_bias
// [own_count][2 * middle], each as of a layer, down_bias [own_count][hidden_size].
constexpr int EXPERT_GROUPS_MAX = 64;
struct Experts {
    Matrix router, shared_gate_up, shared_down;
    const Matrix *gate_up, *down;
    const float *shared_gate, *score_bias, *router_bias, *gate_up_bias, *down_bias;
    int32_t count, own_first, own_count, per_token, normalizes, middle, shared_middle;
    int32_t scoring, group_count, groups_per_token, group_leaders, weighs_inputs;
    float scale;
};

// In state_space.h.
enum StateNorm : int32_t { NORM_OF_GATED = 0, NORM_BEFORE_GATE = 1, NO_STATE_NORM = 2 };

// What a layer has in the place of attention or beside it that keeps a state for a whole sequence (see state_space.h); input
// is its first projection, `projected` numbers of a row, and output its last. heads: 0 is a short convolution: three times `channels`
// are projected, b, c and x, and b * x is convolved and multiplied with c. Else z, x, b, c and time steps are, of
// which x, b and c are the convolution's channels: x has heads * head_dim, b and c groups * vectors each. conv_weights:
// [kernel][channels]; conv_bias: [channels] or null; gate_norm: [heads * head_dim], or null without a norm, which norms so many
// groups of them; the others: [heads]. input_bias, output_bias: or null. is_delta: the gated delta rule: z, q, k, v, decays
// and shares are projected, q, k and v are the convolution's channels, and groups are those of keys and queries, each for
// neighbouring heads, or with in_turn for every heads / groups-th one.
struct Recurrent {
    Matrix input, output;
    const float *input_bias, *output_bias;
    const float *conv_weights, *conv_bias, *rates, *skips, *time_step_bias, *gate_norm;
    int32_t channels, kernel, projected, heads, head_dim, groups, vectors;
    int32_t norm, norm_groups, is_delta, in_turn;  // norm: a StateNorm
    float time_step_min, time_step_max;
};

// What stands in the place of query and key heads in latent attention (latent_attention.h). query_up: [heads * (plain +
// turned), query_rank] from queries' latents, which the layer's qkv gives then in the place of queries; query_rank: 0: there
// are none. key_up, value_up: packed in the model's dtype, one head behind the other, [latent, plain] and [value, latent] each.
struct Latent {
    Matrix query_up;
    const void *key_up, *value_up;
    const float *query_norm, *latent_norm;
    int32_t query_rank, plain_dim, turned_dim, value_dim;
    float norm_eps;
};

// What comes in besides behind attention (LAuReL, arXiv 2411.07501): the norm of a product with two matrices of this rank.
struct Laurel {
    Matrix inwards, outwards;
    const float* norm;
    int32_t rank;
};

// Of a model whose hidden state has several streams; see StreamsConfig. ins, outs: [count - 1], of all but the first.
// input_table: [input_vocab_size, layers * input_size], whose rows are multiplied with table_scale; input_norm: [input_size].
constexpr int STREAMS_MAX = 8;
struct Streams {
    Matrix input_table, input_projection;
    const Matrix *ins, *outs;
    const float* input_norm;
    int32_t count, active, input_size, input_vocab_size;
    float table_scale;
};

// Of a layer of such a model. router_norm, input_norm: [hidden_size]; scale: the same, or null. router: [count]
// [hidden_size]; prediction: [count * count][count]; correction: [count][count].
struct LayerStreams {
    Matrix input_gate, input_projection;
    const float *router_norm, *router, *prediction, *correction, *scale, *input_norm;
};

// Rows of one chunk, and the slots in which the layers' states before and behind them lie. reads: -1 is zeros.
struct StateSpan {
    int32_t first_row, count, reads, writes;
};

// Weights are packed (see product.h and quantized.h); biases, norms: float32; absent ones are null. gate_up has blocks of 16 gate
// outputs and 16 up outputs in turn, its bias, too. With pairs_together the heads of queries and keys have 16 of their first
// half and 16 of their second half in turn, their bias, too: what is turned together is computed together. window: 0 sees
// everything. section: not 0: each position sees those of its own section of so many. has_temperature: queries are multiplied
// as Model says. rotary: which of the model's. qk_norm: query_norm and key_norm have a number for each of a head's (HEAD), or
// for each of a row's, and norm each head (HEADS) or all heads together (ROW). is_parallel: the MLP reads what attention
// reads. sinks: of each head what stands in its softmax as one score more, with 0 up to a multiple of 16. query_factor: of
// queries. score_cap: 0 is none. residual_scale: of what is added to the hidden states. experts: in the place of gate_up and
// down, or null; without either the layer has no MLP. recurrent: in the place of attention, whose qkv has no blocks then, or beside it, or null. latent: attention is latent, and qkv gives queries, or their
// latents, and then the token's own latent and its key that is turned; or null.
struct Layer {
    Matrix qkv, output, gate_up, down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    const float *attention_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm, *query_norm, *key_norm, *sinks;
    int32_t pairs_together, window, rotary, qk_norm, activation, is_parallel, section, has_temperature;
    float query_factor, score_cap, residual_scale;
    const Experts* experts;
    const Recurrent* recurrent;
    const Latent* latent;
    const Laurel* laurel;
    const LayerStreams* streams;
    const float* value_norm;  // [head_dim], of each head's values; or null
    int32_t shares_kv;        // its pages are another layer's, and qkv gives queries alone
    const Matrix* attention_gate;   // whose sigmoid what the heads attended to is multiplied with; or null
    const float* attention_gate_bias;
    int32_t has_cutoff;
    float cutoff;  // a gate becomes what it is above its row's mean and so many standard deviations, or 0
    // What attention, or what is in its place or beside it, gives is a part, and the sum of all ranks' is meant; as is what
    // the MLP gives, or the mixture.
    int32_t sums_attention, sums_mlp;
};

// intermediate_size: the largest. latent_dim: of latent attention, whose head_dim is that of the cache's keys; 0 is none.
// temperature_interval, temperature_scale: queries at a position of some layers are multiplied by 1 + scale * ln(1 + (position
// + temperature_first) / interval), a whole number. batch_invariant: not 0: the bits of a row's logits depend on its tokens and the weights
// alone. Without AMX they always do. Of embedding and head the rows of vocab_count tokens from vocab_first on are here.
struct Model {
    int32_t dtype, layer_count, hidden_size, intermediate_size, head_count, kv_head_count, head_dim, vocab_size;
    int32_t page_tokens, batch_invariant, norm_kind, rotary_count, latent_dim;
    int32_t kv_format, temperature_interval, temperature_first;  // a KvFormat
    float norm_eps, embedding_scale, logit_scale, logit_cap, temperature_scale;  // a cap of 0 is none
    const float* frequencies;  // [rotaries][D / 2], radians a token; D: of what is turned
    const float* magnitudes;   // the same, of cosine and sine
    const Layer* layers;
    const void* embedding;  // [vocab_count, hidden]; null: the head has the same numbers
    Matrix head;
    const float* norm;
    const Streams* streams;  // or null
    const Collectives* collectives;  // of the ranks that have the other parts; null: this is the whole model
    int32_t vocab_first, vocab_count;
};

// All counts int32. tables: block tables one behind the other; chunk i's begins at table_firsts[i]. spans: the same, and
// span_firsts has one more; all three null where no layer keeps a state.
struct Step {
    int32_t row_count, chunk_count, sampled_count;
    int32_t top_count_max;  // of all samplings that want logprobs
    const int32_t* token_ids;     // [rows]
    const int32_t* chunk_starts;  // [chunks], position of the first token
    const int32_t* chunk_counts;
    const int32_t* table_firsts;
    const int32_t* tables;
    void* const* pages;            // [layers]
    const int32_t* sampled_rows;   // rows whose next tokens are wanted
    const Sampling* samplings;     // [sampled]
    const int32_t* sampling_ids;
    const float* sampling_biases;
    int32_t* next_ids;             // [sampled]
    int32_t* flaws;                // [sampled]; a row with one has no next id
    float* logprobs;               // [sampled][1 + top_count_max]: the next token's, then the most probable ones'
    int32_t* top_ids;              // [sampled][top_count_max]
    float* hidden;                 // [rows, hidden_size] after the last layer, or null
    const int32_t* waited_for;     // 0, from any moment on: the step is abandoned; or null
    float* const* states;          // [layers]; null for layers without
    const int32_t* span_firsts;    // [chunks + 1]
    const StateSpan* spans;
    float* const* tapped;          // [layers]: gets a layer's input [rows, hidden_size], where not null; or null
    const AdapterLayer* const* adapters;  // [chunks], of each its adapter's layers, or null; null if none has one
    const int32_t* masks_filled;   // 0 until the masks of all samplings can be read; null if none has one
    const int32_t* given_rows;     // [given], whose embeddings are not their tokens', in any order, none twice
    const float* given_values;     // [given, hidden_size]
    int32_t given_count;
};

class Engine;

Engine* make_engine(int thread_count);
void close_engine(Engine* engine);
// True: finished. False: abandoned.
bool run_step(Engine& engine, const Model& model, const Step& step);
// hidden: float32 [rows, hidden_size] as a step gives it. Of each row's logits the logprobs of targets[row] and of the
// top_count best, as in a Step. False: there was one that is not finite.
bool run_logprobs(Engine& engine, const Model& model, const float* hidden, int64_t rows, const int32_t* targets,
                  int32_t top_count, float* logprobs, int32_t* top_ids);
// The sampling of a step alone. logits: float32 [sampled, vocab].
void run_sampling(Engine& engine, const Step& step, int64_t vocab, const float* logits);
// The attention of a model's first layer alone. queries, attended: [rows, H * D] in the model's dtype, or attended [rows, H *
// latent_dim]; the step's keys and values are in its pages already.
void run_attention(Engine& engine, const Model& model, const Step& step, const void* queries, void* attended);
// y [m, n] = x W^T alone. x: [m, padded k] with rows to read up to the next 16. batch_invariant: as a model's.
void run_product(Engine& engine, DtypeName dtype, bool batch_invariant, const void* x, int64_t m, const Matrix& weight,
                 int64_t n, float* y);

}  // namespace trioserve
