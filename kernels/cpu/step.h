// One forward pass of a decoder-only model over the paged KV cache, and its inputs. native.py mirrors these structs field
// by field.
#pragma once

#include <cstdint>

#include "adapters.h"
#include "collectives.h"
#include "sampling.h"
#include "team.h"

namespace trioserve {

enum DtypeName : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };
// A LayerNorm with biases has them after its weights.
enum NormKind : int32_t { RMS_NORM = 0, LAYER_NORM = 1, BIASED_LAYER_NORM = 2 };
enum QkNorm : int32_t { NO_QK_NORM = 0, HEAD_NORM = 1, HEADS_NORM = 2, ROW_NORM = 3 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, GELU = 3, RELU = 4, RELU2 = 5, XIELU = 6 };

// Some of a matrix's outputs, in blocks of 16. format: a WeightFormat of quantized.h. DENSE is the model's dtype.
struct WeightPart {
    const void* data;
    int32_t first_block, block_count, format, inputs;
};

// A part with block_count 0 is absent.
struct Matrix {
    WeightPart parts[6];
};

enum Scoring : int32_t { SOFTMAX = 0, SIGMOID = 1, SPARSEMIXER = 2 };

// A mixture of experts. Each row uses its per_token best experts of the groups_per_token best of group_count groups. A
// group counts by the sum of its group_leaders best scores.
// router: the projection that scores the experts. router_bias: [count], or null.
// score_bias: [count], added to the scores for choosing only, or null.
// normalizes: nonzero divides the weights of a row's experts by their sum. scale: multiplies the weights afterwards.
// own_first, own_count: the experts of this rank. Other ranks have the rest. The arrays of experts have own_count entries:
// gate_up, down: [own_count], each like a layer's. gate_up_bias: [own_count][2 * middle], down_bias: [own_count]
// [hidden_size], or null. middle: intermediate size of an expert.
// shared_gate_up, shared_down: the shared expert that every row uses, absent without blocks. shared_gate: [hidden_size], or
// null.
// router_norm, norm, output_norm, shared_output_norm: [hidden_size], or all are null. The first two normalize the hidden
// state for the router and the experts. The others normalize the sum of the experts, and the result of the shared expert.
// expert_scale: [count], multiplies the weights of experts, or null.
// logit_cap: if not 0, limits the router's products, see ScoreCap. nearness: of SPARSEMIXER, see ExpertsConfig.
// identity_first: experts from this one on return their input. If other ranks add their results, it is count.
constexpr int EXPERT_GROUPS_MAX = 64;
struct Experts {
    Matrix router, shared_gate_up, shared_down;
    const Matrix *gate_up, *down;
    const float *shared_gate, *score_bias, *router_bias, *gate_up_bias, *down_bias;
    const float *router_norm, *norm, *output_norm, *shared_output_norm, *expert_scale;
    int32_t count, own_first, own_count, per_token, normalizes, middle, shared_middle;
    int32_t scoring, group_count, groups_per_token, group_leaders, weighs_inputs, identity_first;
    float scale, logit_cap, nearness;
};

// How the output of a recurrent layer is normalized, see state_space.h.
enum StateNorm : int32_t { NORM_OF_GATED = 0, NORM_BEFORE_GATE = 1, NO_STATE_NORM = 2 };

// A recurrent layer: instead of attention or beside it, with a state per sequence (see state_space.h).
// input: the first projection, with `projected` outputs per row. output: the last projection. input_bias, output_bias: or null.
// Short convolution (heads is 0): the projection gives b, c and x, each with `channels` numbers. b * x is convolved and
// multiplied by c.
// State space: the projection gives z, x, b, c and time steps. x, b and c are the channels of the convolution: x has heads
// * head_dim numbers, b and c have groups * vectors numbers each.
// Gated delta rule (is_delta): the projection gives z, q, k, v, decays and shares. q, k and v are the channels of the
// convolution. A group of keys and queries serves adjacent heads, or with in_turn every (heads / groups)-th head. If latent is
// not 0, the projection gives latents of this size instead of z and decays. gate_up projects to z, and decay_up to decays for
// each row of a head's state, which have [heads * vectors] biases. The output is multiplied by sigmoid(z) instead of silu(z).
// Selective scan (rank is not 0): the projection gives x, which is convolved, and z. All channels are one head. selection:
// projects x to a latent of `rank` numbers, b and c. time_step: projects the latent to a time step for each channel.
// selection_norm: normalizes the latent, b and c, or null. rates: [vectors][channels]. skips, time_step_bias: [channels].
// conv_weights: [kernel][channels]. conv_bias: [channels], or null. gate_norm: [heads * head_dim], or null without a norm.
// It normalizes norm_groups groups. rates, skips, time_step_bias: [heads].
struct Recurrent {
    Matrix input, output, selection, time_step, gate_up, decay_up;
    const float *input_bias, *output_bias;
    const float *conv_weights, *conv_bias, *rates, *skips, *time_step_bias, *gate_norm, *selection_norm;
    int32_t channels, kernel, projected, heads, head_dim, groups, vectors;
    int32_t norm, norm_groups, is_delta, in_turn, rank, latent;  // norm is a StateNorm
    float time_step_min, time_step_max, selection_eps;
    float share_scale, norm_eps;  // of the delta rule: factor of the shares, and epsilon of its norm, or 0 for the model's
};

// Latent attention (latent_attention.h), instead of query and key heads.
// query_up: [heads * (plain + rotated), query_rank] computes queries from the queries' latents, which the layer's qkv gives
// instead of queries. If query_rank is 0, queries have no latents.
// key_up, value_up: packed in the model's dtype, one matrix per head: [latent, plain] and [value, latent].
struct Latent {
    Matrix query_up;
    const void *key_up, *value_up;
    const float *query_norm, *latent_norm;
    int32_t query_rank, plain_dim, turned_dim, value_dim;
    float norm_eps;
};

// LAuReL (arXiv 2411.07501): the norm of a low-rank product, which is added after attention.
struct Laurel {
    Matrix inwards, outwards;
    const float* norm;
    int32_t rank;
};

// A model whose hidden state has several streams, or whose layers have inputs (count 1), see StreamsConfig. ins, outs: [count - 1], for all streams but the first.
// input_table: [input_vocab_size, layers * input_size]. table_scale multiplies its rows. input_norm: [input_size].
constexpr int STREAMS_MAX = 8;
struct Streams {
    Matrix input_table, input_projection;
    const Matrix *ins, *outs;
    const float* input_norm;
    int32_t count, active, input_size, input_vocab_size;
    float table_scale;
};

// A layer of a model with streams. With one stream, only the first three are there. router_norm, input_norm: [hidden_size]. scale: [hidden_size], or null. router:
// [count][hidden_size]. prediction: [count * count][count]. correction: [count][count].
struct LayerStreams {
    Matrix input_gate, input_projection;
    const float *input_norm, *router_norm, *router, *prediction, *correction, *scale;
};

// The rows of one chunk, and the slots of the layers' states before and after these rows. reads: -1 starts with zeros.
struct StateSpan {
    int32_t first_row, count, reads, writes;
};

// A layer. Weights are packed (see product.h and quantized.h). Biases and norms are float32, or null if the layer has none.
// gate_up: blocks of 16 gate outputs and of 16 up outputs alternate, also in its bias. If has_gate is 0, it has only up
// outputs.
// pairs_together: in query and key heads, 16 outputs of the first half and 16 of the second half alternate, also in the
// bias. So numbers that are rotated together are computed together.
// window: tokens that a position sees. 0 is all. section: if not 0, a position sees only its own section of this length.
// head_count, kv_head_count, head_dim: heads of attention. In latent attention, head_dim is that of the cache's keys.
// value_dim: numbers of a value, or 0 for head_dim. In the cache, head_dim - value_dim unused numbers follow a value.
// has_temperature: nonzero scales queries by their position, see Model. rotary: index of the model's rotary embedding.
// qk_norm: query_norm and key_norm have one number per number of a head (HEAD), or per number of a row. The latter
// normalize each head (HEADS) or all heads together (ROW). has_turned_norms: nonzero normalizes heads after they are
// rotated. clip: if not 0, queries, keys and values are limited to the range from -clip to clip. Only HEAD has biases, if the model's norms have biases.
// is_parallel: nonzero if the MLP reads the same hidden state as attention: its norm with mlp_norm, or without mlp_norm
// the input of attention. sinks: an extra score of each head in its softmax, padded
// with 0 to a multiple of 16. slopes: [head_count], see AttentionShape. query_factor: multiplies queries. score_cap: 0 is none. residual_scale: multiplies what is
// added to the hidden state.
// shortcut: experts that read the input of the MLP, or null. The result of the next MLP without a shortcut contains theirs.
// experts: instead of gate_up and down, or null. Without experts and gate_up, the layer has no MLP. recurrent: beside
// attention, or instead of attention if qkv has no blocks, or null. If qkv has no blocks either, the layer is only an MLP. latent: null without latent attention. With latent
// attention, qkv gives queries or their latents, followed by the token's own latent and its rotated key.
struct Layer {
    Matrix qkv, output, gate_up, down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    const float *attention_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm, *query_norm, *key_norm, *sinks;
    const float *activation_weights, *slopes;  // activation_weights: alpha_p, alpha_n, beta and eps of xIELU, or null
    int32_t pairs_together, window, rotary, qk_norm, activation, is_parallel, section, has_temperature;
    int32_t head_count, kv_head_count, head_dim, has_turned_norms, value_dim;
    float query_factor, score_cap, residual_scale, clip;
    const Experts *experts, *shortcut;
    const Recurrent* recurrent;
    const Latent* latent;
    const Laurel* laurel;
    const LayerStreams* streams;
    const float* value_norm;  // [head_dim], normalizes each head's values, or null
    const float* scale;       // [1], multiplies the hidden state after the layer, or null
    int32_t shares_kv;        // nonzero: the pages belong to an earlier layer, and qkv gives only queries
    // The sigmoid of its product multiplies the output of the heads, or null. has_softplus_gate: softplus instead of sigmoid.
    // gates_heads: nonzero if the product has one number per head instead of one per number. Bias: padded to whole blocks.
    const Matrix* attention_gate;
    const float* attention_gate_bias;
    int32_t has_softplus_gate, gates_heads;
    int32_t has_cutoff;
    float cutoff;  // subtracts mean + cutoff * deviation of the row from each gate, at least 0
    // Nonzero if this rank computes only a part of the output of attention (and recurrent part), or of the MLP. Then the
    // parts of all ranks are summed.
    int32_t sums_attention, sums_mlp;
    int32_t has_gate;
};

// A model, or the part of a rank. intermediate_size: the largest of all layers. turned_dim: numbers of a head that are
// rotated, the most of all layers. latent_dim: numbers of a value in latent attention. 0 is ordinary attention.
// temperature_*: layers with a temperature multiply queries by 1 + scale * ln(1 + floor((position + first) / interval)).
// batch_invariant: nonzero makes the bits of a row's logits depend only on its tokens and the weights. Without AMX they
// always do. vocab_first, vocab_count: the tokens whose rows of embedding and head are here.
struct Model {
    int32_t dtype, layer_count, hidden_size, intermediate_size, turned_dim, vocab_size;
    int32_t page_tokens, batch_invariant, norm_kind, rotary_count, latent_dim;
    int32_t kv_format, temperature_interval, temperature_first;  // kv_format is a KvFormat
    float norm_eps, embedding_scale, logit_scale, logit_cap, temperature_scale;  // a logit_cap of 0 is none
    const float* frequencies;  // [rotaries][turned_dim / 2], radians per token
    const float* magnitudes;   // [rotaries][turned_dim / 2], factors of cosine and sine
    const int32_t* axes;       // [rotaries][turned_dim / 2], which of Step.positions rotates each pair, or null
    const Layer* layers;
    const void* embedding;  // [vocab_count, hidden_size], or null if the head has the same numbers
    Matrix head;
    const float* norm;
    const Streams* streams;  // or null
    const Collectives* collectives;  // of the ranks with the other parts, or null for a whole model
    int32_t vocab_first, vocab_count;
    const float* head_bias;  // [vocab_count], padded with 0 to a multiple of 16, or null
    const void* positions;   // [position_first + context, hidden_size], is added to embeddings, or null
    const float* embedding_norm;  // normalizes embeddings, or null
    int32_t position_first;  // row of position 0
};

// Inputs and outputs of one step. Counts are int32. tables: all block tables, that of chunk i from table_firsts[i] on.
// spans: all spans, those of chunk i from span_firsts[i] to span_firsts[i + 1] - 1. states, span_firsts and spans are null
// if no layer has a state.
struct Step {
    int32_t row_count, chunk_count, sampled_count;
    int32_t top_count_max;  // the largest top_count of samplings that want logprobs
    const int32_t* token_ids;     // [rows]
    const int32_t* chunk_starts;  // [chunks], position of the first token
    const int32_t* chunk_counts;
    const int32_t* table_firsts;
    const int32_t* tables;
    void* const* pages;            // [layers]
    const int32_t* sampled_rows;   // [sampled], rows whose next tokens are sampled
    const Sampling* samplings;     // [sampled]
    const int32_t* sampling_ids;
    const float* sampling_biases;
    int32_t* next_ids;             // [sampled]
    int32_t* flaws;                // [sampled], a Flaw, or 0. A row with a flaw has no next id.
    float* logprobs;               // [sampled][1 + top_count_max]: of the next token, then of the most probable tokens
    int32_t* top_ids;              // [sampled][top_count_max]
    float* hidden;                 // [rows, hidden_size] after the last layer, or null
    const int32_t* waited_for;     // becomes 0 when the step is abandoned. Or null.
    float* const* states;          // [layers], null for layers without a state
    const int32_t* span_firsts;    // [chunks + 1]
    const StateSpan* spans;
    float* const* tapped;          // [layers], receives a layer's input [rows, hidden_size] unless null. Or null.
    const AdapterLayer* const* adapters;  // [chunks], the layers of each chunk's adapter, or null. Null without adapters.
    const int32_t* masks_filled;   // 0 until all masks may be read. Null without masks.
    const int32_t* given_rows;     // [given], rows with given values instead of embeddings, in any order, without duplicates
    const float* given_values;     // [given, given_width], see StepRows
    int32_t given_count, given_width;
    const int32_t* positions;      // [rows][3], positions that rotate queries and keys. Null: the index in the sequence.
    const int32_t* row_ends;       // [rows], position after the last token that a row sees, never decreasing in a chunk, or null
};

class Engine;

Engine* make_engine(int thread_count);
void close_engine(Engine* engine);
// Returns true if the step was finished, false if it was abandoned.
bool run_step(Engine& engine, const Model& model, const Step& step);
// Computes log-probabilities of targets[row] and of the top_count best tokens of each row, as in a Step. hidden: float32
// [rows, hidden_size], as a step returns it. Returns false if a row has NaN or infinity.
bool run_logprobs(Engine& engine, const Model& model, const float* hidden, int64_t rows, const int32_t* targets,
                  int32_t top_count, float* logprobs, int32_t* top_ids);
// Runs only the sampling of a step. logits: float32 [sampled, vocab].
void run_sampling(Engine& engine, const Step& step, int64_t vocab, const float* logits);
// Computes only the attention of a model's first layer. The step's keys and values must be in its pages. queries: [rows, H
// * D] in the model's dtype. attended: [rows, H * D] or [rows, H * latent_dim].
void run_attention(Engine& engine, const Model& model, const Step& step, const void* queries, void* attended);
// Computes only y [m, n] = x W^T. x: [m, padded k], readable up to the next multiple of 16 rows. batch_invariant: see Model.
void run_product(Engine& engine, DtypeName dtype, bool batch_invariant, const void* x, int64_t m, const Matrix& weight,
                 int64_t n, float* y);

}  // namespace trioserve
