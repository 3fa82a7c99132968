// One tile of one kv head: its keys and values are packed into panels and multiplied from there.
#pragma once

#include "prefill_rows.h"

namespace pointsman {

// Elements of a packed tile: keys, then values.
inline int64_t keys_size(const Layer& layer) { return layer.head_dim * kTileTokens; }
inline int64_t tile_size(const Layer& layer) {
  return (layer.head_dim + layer.padded_dim()) * kTileTokens;
}

// Keys of 16 tokens of one block into half of a panel: [pair][32 tokens][2]. Tokens after the
// context hold anything: their scores are masked.
inline void pack_keys(const bf16* keys, int64_t token_stride, int64_t head_dim, bf16* target) {
  for (int64_t first = 0; first < head_dim / 2; first += 16) {
    const __mmask16 mask = mask16(head_dim / 2 - first);
    __m512i pairs[16];
    for (int token = 0; token < 16; ++token) {
      pairs[token] = _mm512_maskz_loadu_epi32(mask, keys + token * token_stride + 2 * first);
    }
    transpose(pairs);
    const int64_t count = std::min<int64_t>(16, head_dim / 2 - first);
    for (int64_t pair = 0; pair < count; ++pair) {
      _mm512_storeu_si512(target + (first + pair) * 2 * kPanelColumns, pairs[pair]);
    }
  }
}

// 32 places of the values of a pair of tokens: [32 places][2 tokens].
inline void pack_value_pair(const bf16* first, const bf16* second, __mmask32 first_mask,
                            __mmask32 second_mask, bf16* target) {
  alignas(64) static constexpr uint16_t kPlaces[32] = {
      0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low_places = _mm512_load_si512(kPlaces);
  const __m512i high_places = _mm512_add_epi16(low_places, _mm512_set1_epi16(16));
  const __m512i left = _mm512_maskz_loadu_epi16(first_mask, first);
  const __m512i right = _mm512_maskz_loadu_epi16(second_mask, second);
  _mm512_storeu_si512(target, _mm512_permutex2var_epi16(left, low_places, right));
  _mm512_storeu_si512(target + 32, _mm512_permutex2var_epi16(left, high_places, right));
}

// The tile from position `first` on, up to `end`; places after that are zero. Calls fetch(token) before
// each sixteen tokens.
template <typename Fetch>
void pack_tile(const Layer& layer, const Span& span, int64_t kv_head, int64_t first, int64_t end,
               bf16* tile, const Fetch& fetch) {
  const int64_t panel_size = layer.head_dim * kPanelColumns;
  bf16* values = tile + keys_size(layer);
  for (int64_t token = first; token < end; token += 16) {
    fetch(token);
    const int64_t offset = token_offset(layer, span.table, token) + kv_head * layer.head_dim;
    const int64_t at = token - first;
    pack_keys(layer.keys + offset, layer.token_stride, layer.head_dim,
              tile + at / kPanelColumns * panel_size + at % kPanelColumns * 2);
    for (int64_t pair = 0; pair < 8; ++pair) {
      const bf16* source = layer.values + offset + 2 * pair * layer.token_stride;
      for (int64_t chunk = 0; chunk < layer.num_chunks(); ++chunk) {
        const __mmask32 mask = mask32(layer.head_dim - 32 * chunk);
        const __mmask32 first_mask = token + 2 * pair < end ? mask : 0;
        const __mmask32 second_mask = token + 2 * pair + 1 < end ? mask : 0;
        pack_value_pair(source + 32 * chunk, source + layer.token_stride + 32 * chunk, first_mask,
                        second_mask,
                        values + chunk * kTileTokens * kPanelColumns + at * 32 + pair * 64);
      }
    }
  }
  // A panel may be half packed: multiplied are whole panels, with weight zero.
  for (int64_t token = (end + 15) / 16 * 16; token < first + kTileTokens; token += 2) {
    for (int64_t chunk = 0; chunk < layer.num_chunks(); ++chunk) {
      pack_value_pair(values, values, 0, 0,
                      values + chunk * kTileTokens * kPanelColumns + (token - first) * 32);
    }
  }
}

// The rows' queries, one after the other.
inline void copy_queries(const Rows& rows, const bf16* queries, bf16* target) {
  rows.for_each([&](int64_t row, int64_t, int64_t place) {
    std::copy_n(queries + place, rows.layer.head_dim, target + row * rows.layer.head_dim);
  });
}

template <int Count, typename Fetch>
inline void score_tile(const bf16* queries, int64_t width, const bf16* keys, int64_t num_panels,
                       TileWeights& weights, Fetch& fetch) {
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    __m512 products[Count][2];
    for (int row = 0; row < Count; ++row) products[row][0] = products[row][1] = _mm512_setzero_ps();
    add_products<Count>(queries, width, keys + panel * width * kPanelColumns, width / 2, fetch,
                        products);
    for (int row = 0; row < Count; ++row) {
      _mm512_store_ps(weights.scores[row] + panel * kPanelColumns, products[row][0]);
      _mm512_store_ps(weights.scores[row] + panel * kPanelColumns + 16, products[row][1]);
    }
  }
}

template <int Count, typename Fetch>
inline void add_tile(const Layer& layer, const TileWeights& weights, const bf16* packed,
                     int64_t num_tokens, const Running& running, Fetch& fetch) {
  const int64_t stride = layer.padded_dim();
  for (int64_t chunk = 0; chunk < layer.num_chunks(); ++chunk) {
    float* places = running.values + 32 * chunk;
    __m512 sums[Count][2];
    for (int row = 0; row < Count; ++row) {
      const __m512 factor = _mm512_set1_ps(weights.factors[row]);
      sums[row][0] = _mm512_mul_ps(_mm512_load_ps(places + row * stride), factor);
      sums[row][1] = _mm512_mul_ps(_mm512_load_ps(places + row * stride + 16), factor);
    }
    add_products<Count>(weights.weights[0], kTileTokens,
                        packed + chunk * kTileTokens * kPanelColumns, num_tokens / 2, fetch,
                        sums);
    for (int row = 0; row < Count; ++row) {
      _mm512_store_ps(places + row * stride, sums[row][0]);
      _mm512_store_ps(places + row * stride + 16, sums[row][1]);
    }
  }
}

// Up to 12 rows and the packed tile from position `first` on.
template <typename Fetch>
void attend_tile(const Rows& rows, int64_t first, const bf16* queries, const bf16* tile,
                 const Running& running, Fetch&& fetch) {
  const Layer& layer = rows.layer;
  const int64_t left = std::min(rows.context_tokens() - first, kTileTokens);
  if (left <= 0) return;
  const int64_t num_panels = (left + kPanelColumns - 1) / kPanelColumns;
  with_rows(static_cast<int>(rows.count), [&]<int Count>() {
    TileWeights weights;
    score_tile<Count>(queries, layer.head_dim, tile, num_panels, weights, fetch);
    weights.weigh(rows, first, num_panels * kPanelColumns, running);
    add_tile<Count>(layer, weights, tile + keys_size(layer), num_panels * kPanelColumns, running,
                    fetch);
  });
}

}  // namespace pointsman
