// Rows of prompt tokens and their running softmax.
//
// A row takes the tiles of its context in order with a running maximum (FlashAttention, Dao et al.,
// 2022); at the end of each section the running results are set aside and merged, in order
// (Flash-Decoding, Dao et al., 2023). So its result depends on its own context alone: not on the
// chunk it came in, nor on the rows or the threads it is computed with.
#pragma once

#include "attention.h"

namespace pointsman {

// Tiles and sections start at multiples of their size, whatever the chunk.
constexpr int64_t kTileTokens = 128;
constexpr int64_t kSectionTokens = 256;

struct Span {
  const int32_t* table;
  int64_t first_row;
  int64_t num_tokens;
  int64_t position;  // of the first token

  Span(const Step& step, int64_t number) {
    const int32_t* fields = step.prefill_spans + 3 * number;
    table = step.block_tables + fields[0] * step.table_width;
    first_row = fields[1];
    num_tokens = fields[2];
    position = step.positions[first_row];
  }
  int64_t context_tokens() const { return position + num_tokens; }
};

// Of parts with these first numbers, and the number after the last, the one that `number` is in.
inline int64_t find(const int64_t* starts, int64_t num_parts, int64_t number) {
  return std::upper_bound(starts, starts + num_parts + 1, number) - starts - 1;
}

// Up to 12 rows of one kv head's group: (token, head of the group) pairs of a span, token by token.
struct Rows {
  const Layer& layer;
  Span span;
  int64_t kv_head;
  int64_t count;
  int64_t group_size;
  int64_t first_token;  // of the span
  int64_t first_member;
  int64_t last_token;

  // The span's pairs from the `first` on, before the `end`.
  Rows(const Layer& of_layer, const Span& of_span, int64_t of_kv_head, int64_t first, int64_t end)
      : layer(of_layer),
        span(of_span),
        kv_head(of_kv_head),
        count(std::min<int64_t>(kMaxRows, end - first)),
        group_size(of_layer.group_size()),
        first_token(first / group_size),
        first_member(first % group_size),
        last_token((first + count - 1) / group_size) {}

  int64_t first_visible() const { return layer.first_visible(span.position + first_token); }
  int64_t context_tokens() const { return span.position + last_token + 1; }

  // Calls body(row, position, place in queries and results) for each: divides nothing.
  template <typename Body>
  void for_each(const Body& body) const {
    int64_t token = first_token, member = first_member;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t head = kv_head * group_size + member;
      body(row, span.position + token,
           ((span.first_row + token) * layer.num_heads + head) * layer.head_dim);
      if (++member == group_size) {
        member = 0;
        ++token;
      }
    }
  }
};

// Results of up to 12 rows over some of their context: sums of weighted values and of weights, and
// the maxima that the weights are relative to.
struct Running {
  float* values;  // [row][padded_dim]
  float* sums;    // [row][16]
  float* maxima;  // [16]

  static int64_t num_floats(const Layer& layer) { return kMaxRows * (layer.padded_dim() + 16) + 16; }
  Running(const Layer& layer, float* data)
      : values(data), sums(values + kMaxRows * layer.padded_dim()), maxima(sums + kMaxRows * 16) {}

  void clear() const {
    std::fill(values, maxima, 0.0f);
    std::fill_n(maxima, 16, kMinusInfinity);
  }
};

// Up to 12 rows and one tile. Scores become weights; a row's factor is that of its results so far.
struct TileWeights {
  alignas(64) float scores[kMaxRows][kTileTokens];
  alignas(64) bf16 weights[kMaxRows][kTileTokens];
  alignas(64) float factors[16];

  // The first `num_tokens`, a multiple of 16, of the tile from position `first` on.
  void weigh(const Rows& rows, int64_t first, int64_t num_tokens, const Running& running) {
    alignas(64) float largest[16];
    _mm512_store_ps(largest, _mm512_set1_ps(kMinusInfinity));
    rows.for_each([&](int64_t row, int64_t position, int64_t) {
      largest[row] = hide(scores[row], num_tokens, rows.layer.first_visible(position) - first,
                          position + 1 - first);
    });
    const __m512 scale = _mm512_set1_ps(rows.layer.scale), before = _mm512_load_ps(running.maxima);
    const __m512 maxima = _mm512_max_ps(before, _mm512_mul_ps(_mm512_load_ps(largest), scale));
    const __mmask16 has_changed = _mm512_cmp_ps_mask(before, maxima, _CMP_NEQ_OQ);
    _mm512_store_ps(factors, _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), has_changed,
                                                exp2(_mm512_sub_ps(before, maxima))));
    _mm512_store_ps(running.maxima, maxima);
    for (int64_t row = 0; row < rows.count; ++row) {
      if (largest[row] == kMinusInfinity) {  // it sees nothing of the tile
        std::fill_n(weights[row], num_tokens, bf16{0});
        continue;
      }
      const __m512 top = _mm512_set1_ps(running.maxima[row]);
      float* sums = running.sums + row * 16;
      __m512 sum = _mm512_mul_ps(_mm512_load_ps(sums), _mm512_set1_ps(factors[row]));
      for (int64_t at = 0; at < num_tokens; at += 16) {
        const __m512 score = _mm512_load_ps(scores[row] + at);
        const __m512 weight = exp2(_mm512_fmsub_ps(score, scale, top));
        sum = _mm512_add_ps(sum, weight);
        store_narrow(weights[row] + at, 0xFFFF, weight);
      }
      _mm512_store_ps(sums, sum);
    }
  }

 private:
  // Hides the scores outside [begin, end); the largest of the others.
  static float hide(float* scores, int64_t num_tokens, int64_t begin, int64_t end) {
    __m512 largest = _mm512_set1_ps(kMinusInfinity);
    for (int64_t at = 0; at < num_tokens; at += 16) {
      __m512 part = _mm512_load_ps(scores + at);
      if (begin > at || end < at + 16) {
        const __mmask16 seen = mask16(end - at) & static_cast<__mmask16>(~mask16(begin - at));
        part = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), seen, part);
        _mm512_store_ps(scores + at, part);
      }
      largest = _mm512_max_ps(largest, part);
    }
    return _mm512_reduce_max_ps(largest);
  }
};

// Adds a section's results to those of the sections before it.
inline void merge(const Rows& rows, const Running& section, const Running& total) {
  alignas(64) float total_factors[16], factors[16];
  const __m512 before = _mm512_load_ps(total.maxima), own = _mm512_load_ps(section.maxima);
  const __m512 none = _mm512_set1_ps(kMinusInfinity);
  const __mmask16 seen = _mm512_cmp_ps_mask(own, none, _CMP_NEQ_OQ);  // by rows that see of it
  const __m512 maxima = _mm512_mask_max_ps(before, seen, before, own);
  _mm512_store_ps(factors, _mm512_maskz_mov_ps(seen, exp2(_mm512_sub_ps(own, maxima))));
  _mm512_store_ps(total_factors, _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), seen,
                                                    exp2(_mm512_sub_ps(before, maxima))));
  _mm512_store_ps(total.maxima, maxima);
  const int64_t stride = rows.layer.padded_dim();
  for (int64_t row = 0; row < rows.count; ++row) {
    const __m512 factor = _mm512_set1_ps(factors[row]);
    const __m512 total_factor = _mm512_set1_ps(total_factors[row]);
    const auto add = [&](const float* source, float* target) {
      const __m512 sum = _mm512_mul_ps(_mm512_load_ps(target), total_factor);
      _mm512_store_ps(target, _mm512_fmadd_ps(_mm512_load_ps(source), factor, sum));
    };
    add(section.sums + row * 16, total.sums + row * 16);
    for (int64_t at = row * stride; at < (row + 1) * stride; at += 16) {
      add(section.values + at, total.values + at);
    }
  }
}

// Writes the rows' results.
inline void finish(const Rows& rows, const Running& total, bf16* target) {
  const int64_t width = rows.layer.head_dim, stride = rows.layer.padded_dim();
  rows.for_each([&](int64_t row, int64_t, int64_t place) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(total.sums + row * 16));
    const __m512 inverse = _mm512_set1_ps(1.0f / sum);
    for (int64_t at = 0; at < width; at += 16) {
      const __m512 part = _mm512_load_ps(total.values + row * stride + at);
      store_narrow(target + place + at, mask16(width - at), _mm512_mul_ps(part, inverse));
    }
  });
}

}  // namespace pointsman
