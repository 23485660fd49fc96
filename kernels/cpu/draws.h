// The race of exponential clocks that draws a token, and its random numbers. trioserve/model/torch_step/sampler.py describes both.
#pragma once

#include <cmath>

#include "row_passes.h"

namespace trioserve {

constexpr int DRAW_TILES = 512;  // equal to the constant in trioserve/model/torch_step/sampler.py

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

inline uint64_t mixed(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    return state ^ (state >> 31);
}

inline uint64_t draw_word(uint64_t seed, int64_t position) {
    return mixed(mixed(seed + GAMMA) + uint64_t(position + 1) * GAMMA);
}

inline double exponential(uint64_t word, int64_t index) {
    return -std::log((double(mixed(word + uint64_t(index + 1) * GAMMA) >> 12) + 0.5) / 4503599627370496.0);
}

// First half of the race in sampler.py: returns the winning tile, by the tiles' sums.
inline int winning_tile(const double* tiles, uint64_t word) {
    int tile = 0;
    double best = -1;
    for (int index = 0; index < DRAW_TILES; index++) {
        if (tiles[index] == 0) continue;
        const double speed = tiles[index] / exponential(word, index);
        if (speed > best) {
            best = speed;
            tile = index;
        }
    }
    return tile;
}

// The race in sampler.py: between tiles by their sums, then between tokens of the winner. weights: padded with zeros.
inline int32_t draw(const float* weights, int64_t vocab, float threshold, uint64_t word) {
    alignas(64) double tiles[DRAW_TILES] = {};
    for (int64_t first = 0; first < vocab; first += LANES) {
        double* sums = tiles + first % DRAW_TILES;
        store(sums, add(load(sums), cut_below(load(weights + first), set(threshold))));
    }
    const int tile = winning_tile(tiles, word);
    int64_t id = tile;
    double best = -1;
    for (int64_t index = tile; index < vocab; index += DRAW_TILES) {
        if (weights[index] < threshold || weights[index] == 0) continue;
        const double speed = double(weights[index]) / exponential(word, DRAW_TILES + index);
        if (speed > best) {
            best = speed;
            id = index;
        }
    }
    return int32_t(id);
}

// Draws among `count` tokens only, lowest id first. The winner is equal to that of a draw among all tokens.
inline int32_t draw_among(const float* weights, const int32_t* ids, int64_t count, float threshold, uint64_t word) {
    double tiles[DRAW_TILES] = {};
    for (int64_t index = 0; index < count; index++)
        if (weights[index] >= threshold) tiles[ids[index] % DRAW_TILES] += weights[index];
    const int tile = winning_tile(tiles, word);
    int32_t id = ids[0];
    double best = -1;
    for (int64_t index = 0; index < count; index++) {
        if (ids[index] % DRAW_TILES != tile || weights[index] < threshold || weights[index] == 0) continue;
        const double speed = double(weights[index]) / exponential(word, DRAW_TILES + ids[index]);
        if (speed > best) {
            best = speed;
            id = ids[index];
        }
    }
    return id;
}

}  // namespace trioserve
