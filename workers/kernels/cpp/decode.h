// Attention of single tokens to contexts in the block pool: bound by reading keys and values.
//
// A context is cut at every 256th position into segments, whatever the batch; each is walked block
// by block for all heads at once, and the segments are merged in order (as in Flash-Decoding, Dao
// et al., 2023). So a row's result depends on its own context alone.
#pragma once

#include "attention.h"

namespace pointsman {

constexpr int64_t kSegmentTokens = 256;
constexpr int64_t kAheadTokens = 32;  // fetched before they are needed

// The heads' results over one segment: maxima and sums, then head_dim sums per head, of which each
// 32 are kept as 16 of even and 16 of odd place.
struct Partial {
  float* maxima;
  float* sums;
  float* values;
  static int64_t num_floats(const Layer& layer) {
    return (layer.num_heads * (2 + layer.padded_dim()) + 15) / 16 * 16;
  }
  Partial(const Layer& layer, float* data)
      : maxima(data + layer.num_heads * layer.padded_dim()),
        sums(maxima + layer.num_heads),
        values(data) {}
};

// Asks for the keys, or the values, of 16 tokens, a share at a time: all at once would fill the queue
// of outstanding reads and stop the sums that run meanwhile.
class Prefetch {
 public:
  Prefetch(const Layer& layer, const bf16* tokens, int64_t num_shares)
      : at_(tokens),
        end_(tokens + 16 * layer.token_stride),
        share_((16 * layer.token_stride / num_shares + 31) / 32 * 32) {}
  void ask_for_share() {
    for (const bf16* end = std::min(at_ + share_, end_); at_ < end; at_ += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T0);
    }
  }

 private:
  const bf16* at_;
  const bf16* end_;
  int64_t share_;
};

// Scores of one head and 16 tokens. The last chunk of a head may be partial.
template <int Chunks>
inline __m512 score_16(const bf16* query, const bf16* keys, int64_t token_stride,
                       __mmask32 last_mask) {
  __m512 sums[16];
  for (int token = 0; token < 16; ++token) sums[token] = _mm512_setzero_ps();
  for (int chunk = 0; chunk < Chunks; ++chunk) {
    const __mmask32 mask = chunk == Chunks - 1 ? last_mask : 0xFFFFFFFFu;
    const __m512bh part = load_bf16(query + 32 * chunk, mask);
    for (int token = 0; token < 16; ++token) {
      const bf16* key = keys + token * token_stride + 32 * chunk;
      sums[token] = _mm512_dpbf16_ps(sums[token], part, load_bf16(key, mask));
    }
  }
  return sum_each(sums);
}

// Adds weights * values of some tokens of a block to 32 places of several heads of one group.
template <int Heads>
inline void add_values(const float* weights, const bf16* values, int64_t token_stride,
                       int64_t num_tokens, __mmask32 mask, int64_t head_stride, float* target) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  __m512 even[Heads], odd[Heads];
  for (int head = 0; head < Heads; ++head) {
    even[head] = _mm512_loadu_ps(target + head * head_stride);
    odd[head] = _mm512_loadu_ps(target + head * head_stride + 16);
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    const __m512i both = _mm512_maskz_loadu_epi16(mask, values + token * token_stride);
    const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(both, high_half));
    for (int head = 0; head < Heads; ++head) {
      const __m512 weight = _mm512_set1_ps(weights[head * kSegmentTokens + token]);
      even[head] = _mm512_fmadd_ps(weight, low, even[head]);
      odd[head] = _mm512_fmadd_ps(weight, high, odd[head]);
    }
  }
  for (int head = 0; head < Heads; ++head) {
    _mm512_storeu_ps(target + head * head_stride, even[head]);
    _mm512_storeu_ps(target + head * head_stride + 16, odd[head]);
  }
}

// The tokens [first, end) of one segment, and of them those from `visible` on.
struct Segment {
  int64_t first;
  int64_t end;
  int64_t visible;
  const int32_t* table;

  // Tokens in whole sixteens, and the sixteen at `token` or the last.
  int64_t size() const { return (end - first + 15) / 16 * 16; }
  int64_t clamped(int64_t token) const { return std::min(token, (end - 1) / 16 * 16); }
};

template <int Chunks>
void score_segment(const Layer& layer, const bf16* queries, const Segment& segment, float* scores) {
  const __mmask32 last_mask = mask32(layer.head_dim - 32 * (Chunks - 1));
  const int64_t group_size = layer.group_size();
  for (int64_t token = segment.first; token < segment.end; token += 16) {
    const bf16* keys = layer.keys + token_offset(layer, segment.table, token);
    const int64_t next = token + kAheadTokens;  // after the last keys come the first values
    Prefetch prefetch(layer,
                      next < segment.end
                          ? layer.keys + token_offset(layer, segment.table, next)
                          : layer.values + token_offset(layer, segment.table,
                                                        segment.clamped(next - segment.size())),
                      layer.num_heads);
    for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {
      for (int64_t member = 0; member < group_size; ++member) {
        const int64_t head = kv_head * group_size + member;
        prefetch.ask_for_share();
        const __m512 sums =
            score_16<Chunks>(queries + head * layer.head_dim, keys + kv_head * layer.head_dim,
                             layer.token_stride, last_mask);
        const __mmask16 mask =
            mask16(segment.end - token) & static_cast<__mmask16>(~mask16(segment.visible - token));
        _mm512_store_ps(scores + head * kSegmentTokens + token - segment.first,
                        _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), mask, sums));
      }
    }
  }
}

// Scores become weights, relative to the segment's largest score.
inline void weigh_segment(const Layer& layer, int64_t num_tokens, float* scores,
                          const Partial& partial) {
  const __m512 scale = _mm512_set1_ps(layer.scale);
  for (int64_t head = 0; head < layer.num_heads; ++head) {
    float* row = scores + head * kSegmentTokens;
    __m512 largest = _mm512_set1_ps(kMinusInfinity);
    for (int64_t at = 0; at < num_tokens; at += 16) {
      largest = _mm512_max_ps(largest, _mm512_load_ps(row + at));
    }
    const float maximum = _mm512_reduce_max_ps(largest) * layer.scale;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t at = 0; at < num_tokens; at += 16) {
      const __m512 weight = exp2(
          _mm512_fmsub_ps(_mm512_load_ps(row + at), scale, _mm512_set1_ps(maximum)));
      _mm512_store_ps(row + at, weight);
      sum = _mm512_add_ps(sum, weight);
    }
    partial.maxima[head] = maximum;
    partial.sums[head] = _mm512_reduce_add_ps(sum);
  }
}

// `follower`: whose keys are wanted next, most likely.
inline void sum_segment(const Layer& layer, const Segment& segment, const Segment& follower,
                        const float* weights, const Partial& partial) {
  constexpr int64_t kHeadsAtOnce = 8;
  const int64_t group_size = layer.group_size(), stride = layer.padded_dim();
  const int64_t num_shares = layer.num_kv_heads * layer.num_chunks() *
                             ((group_size + kHeadsAtOnce - 1) / kHeadsAtOnce);
  std::fill(partial.values, partial.values + layer.num_heads * stride, 0.0f);
  for (int64_t token = segment.first; token < segment.end; token += 16) {
    const bf16* values = layer.values + token_offset(layer, segment.table, token);
    const int64_t num_tokens = std::min<int64_t>(16, segment.end - token);
    const int64_t next = token + kAheadTokens;
    Prefetch prefetch(
        layer,
        next < segment.end
            ? layer.values + token_offset(layer, segment.table, next)
            : layer.keys + token_offset(layer, follower.table,
                                        follower.clamped(follower.first + next - segment.first -
                                                         segment.size())),
        num_shares);
    for (int64_t head = 0; head < layer.num_heads;) {
      const int64_t member = head % group_size;
      const int64_t count = std::min(group_size - member, kHeadsAtOnce);
      const bf16* own = values + head / group_size * layer.head_dim;
      for (int64_t chunk = 0; chunk < layer.num_chunks(); ++chunk) {
        prefetch.ask_for_share();
        with_rows(static_cast<int>(count), [&]<int Heads>() {
          add_values<Heads>(weights + head * kSegmentTokens + token - segment.first,
                            own + 32 * chunk, layer.token_stride, num_tokens,
                            mask32(layer.head_dim - 32 * chunk), stride,
                            partial.values + head * stride + 32 * chunk);
        });
      }
      head += count;
    }
  }
}

// One row's segments, in order, into its bf16 result.
inline void merge_segments(const Layer& layer, float* data, int64_t num_segments, bf16* target) {
  const int64_t size = Partial::num_floats(layer), stride = layer.padded_dim();
  for (int64_t head = 0; head < layer.num_heads; ++head) {
    float maximum = kMinusInfinity, total = 0.0f;
    for (int64_t at = 0; at < num_segments; ++at) {
      maximum = std::max(maximum, Partial(layer, data + at * size).maxima[head]);
    }
    for (int64_t at = 0; at < num_segments; ++at) {  // the maxima become factors
      const Partial partial(layer, data + at * size);
      const __m512 factor = exp2(_mm512_set1_ps(partial.maxima[head] - maximum));
      partial.maxima[head] = _mm512_cvtss_f32(factor);
      total += partial.maxima[head] * partial.sums[head];
    }
    const __m512 inverse = _mm512_set1_ps(1.0f / total);
    for (int64_t chunk = 0; chunk < layer.num_chunks(); ++chunk) {
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      for (int64_t at = 0; at < num_segments; ++at) {
        const Partial partial(layer, data + at * size);
        const float* values = partial.values + head * stride + 32 * chunk;
        const __m512 factor = _mm512_set1_ps(partial.maxima[head]);
        even = _mm512_fmadd_ps(factor, _mm512_loadu_ps(values), even);
        odd = _mm512_fmadd_ps(factor, _mm512_loadu_ps(values + 16), odd);
      }
      const __m512i low = _mm512_cvtepu16_epi32(narrow(_mm512_mul_ps(even, inverse)));
      const __m512i high = _mm512_cvtepu16_epi32(narrow(_mm512_mul_ps(odd, inverse)));
      _mm512_mask_storeu_epi16(target + head * layer.head_dim + 32 * chunk,
                               mask32(layer.head_dim - 32 * chunk),
                               _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

inline void attend_segment(const Layer& layer, const bf16* queries, const Segment& segment,
                           const Segment& follower, float* data) {
  static thread_local Scratch<float> scratch;
  float* scores = scratch.get(layer.num_heads * kSegmentTokens);
  const Partial partial(layer, data);
  with_rows(static_cast<int>(layer.num_chunks()), [&]<int Chunks>() {
    score_segment<Chunks>(layer, queries, segment, scores);
  });
  weigh_segment(layer, segment.end - segment.first, scores, partial);
  sum_segment(layer, segment, follower, scores, partial);
}

// queries, target: bf16 [row][query heads][head_dim].
inline void attend_decode(const Layer& layer, const Step& step, const bf16* queries, bf16* target) {
  if (step.num_decode_rows == 0) return;
  static thread_local Scratch<float> partials;
  static thread_local Scratch<int64_t> numbers;
  const int64_t num_rows = step.num_decode_rows, width = layer.num_heads * layer.head_dim;
  int64_t* starts = numbers.get(num_rows + 1);  // number of a row's first segment
  const auto position_of = [&](int64_t at) { return step.positions[step.decode_rows[2 * at]]; };
  const auto first_segment_of = [&](int64_t at) {
    return layer.first_visible(position_of(at)) / kSegmentTokens;
  };
  starts[0] = 0;
  for (int64_t at = 0; at < num_rows; ++at) {
    starts[at + 1] = starts[at] + position_of(at) / kSegmentTokens + 1 - first_segment_of(at);
  }
  const int64_t size = Partial::num_floats(layer);
  float* data = partials.get(starts[num_rows] * size);
  const auto row_of = [&](int64_t task) {
    return std::upper_bound(starts, starts + num_rows + 1, task) - starts - 1;
  };
  const auto segment_of = [&](int64_t task, int64_t at) {
    const int64_t first = (first_segment_of(at) + task - starts[at]) * kSegmentTokens;
    const int64_t visible = layer.first_visible(position_of(at));
    return Segment{std::max(first, visible / 16 * 16),
                   std::min(first + kSegmentTokens, position_of(at) + 1), visible,
                   step.block_tables + step.decode_rows[2 * at + 1] * step.table_width};
  };
  ThreadPool::instance().run(starts[num_rows], [&](int64_t task) {
    const int64_t at = row_of(task), next = std::min(task + 1, starts[num_rows] - 1);
    attend_segment(layer, queries + step.decode_rows[2 * at] * width, segment_of(task, at),
                   segment_of(next, row_of(next)), data + task * size);
  });
  ThreadPool::instance().run(num_rows, [&](int64_t at) {
    merge_segments(layer, data + starts[at] * size, starts[at + 1] - starts[at],
                   target + step.decode_rows[2 * at] * width);
  });
}

}  // namespace pointsman
