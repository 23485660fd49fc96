// Multi-head latent attention (arXiv 2405.04434) around attention.h. Per token, the cache has a latent and one rotated key for
// all heads. The head's key projection maps a head's query to latents. The head's value projection maps the attention's result
// to values. So keys and values of single heads are never computed.
#pragma once

#include "attention.h"
#include "norms.h"
#include "team.h"

namespace trioserve {

// The part of the first product's row that queries are made of. The latent and the key follow it.
inline int64_t queries_size(const Latent& latent, int64_t heads) {
    return latent.query_rank > 0 ? latent.query_rank : heads * (latent.plain_dim + latent.turned_dim);
}

// to: padded to a multiple of 16. angles: cosines, then sines, of the pairs (j, j + half).
template <class T>
inline void turn(const float* from, const float* angles, int64_t dim, float factor, T* to) {
    constexpr int64_t DIM_MAX = 512;
    alignas(64) float turned[DIM_MAX];
    const int64_t half = dim / 2;
    for (int64_t pair = 0; pair < half; pair++) {
        const float cosine = angles[pair] * factor, sine = angles[half + pair] * factor;
        turned[pair] = from[pair] * cosine - from[half + pair] * sine;
        turned[half + pair] = from[half + pair] * cosine + from[pair] * sine;
    }
    for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(turned + d));
}

// from: latent and key of a row.
template <class T>
inline void store_latent(const Latent& latent, const AttentionShape& shape, const float* from, const float* angles, T* slot) {
    norm_row(from, latent.latent_norm, shape.latent_dim, {RMS_NORM, latent.norm_eps}, [=](int64_t n) { return slot + n; });
    turn(from + shape.latent_dim, angles, latent.turned_dim, 1.0f, slot + shape.latent_dim);
}

// from: one head's query of a row. plain: the head's rows that are mapped to latents. to: the rotated part.
template <class T>
inline void split_query(const Latent& latent, const float* from, const float* angles, float factor, const Rows<T>& plain,
                        int64_t row, T* to) {
    for (int64_t d = 0; d < latent.plain_dim; d += LANES) store(plain.at(row, d), load(from + d));
    plain.pad(row, latent.plain_dim);
    turn(from + latent.plain_dim, angles, latent.turned_dim, factor, to);
}

// y = x W^T for each head separately. weights: packed [outputs, x.dim], one per head. finish(head, first row, count, first
// output block, block count, sums) gets results like that of a product.
template <class T, class Finish>
inline void multiply_heads(Team& team, int thread, const HeadRows<const T>& x, int64_t rows, int64_t heads,
                           const T* weights, int64_t outputs, const Finish& finish) {
    const int64_t blocks = outputs / LANES, block_size = LANES * padded_depth(x.dim);
    const Pieces pieces(rows, panel_count(blocks), x.dim, 1);
    for (int64_t index; (index = team.take_share(thread, heads * pieces.count())) >= 0;) {
        const int64_t head = index / pieces.count();
        const Piece piece = pieces.at(index % pieces.count());
        const T* own = weights + head * blocks * block_size;
        const auto finish_head = [&](int64_t first_row, int count, int64_t first_block, int some, float* sums) {
            finish(head, first_row, count, first_block, some, sums);
        };
        Finishing<decltype(finish_head)> finishing(finish_head);
        compute_piece(piece, x.of(head), own, blocks, 0, own + piece.panel * PANEL_BLOCKS * block_size, finishing);
        finishing.end();
    }
}

}  // namespace trioserve
