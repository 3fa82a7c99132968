// Norms and rotates the heads of a step's tokens and stores keys and values into the block pool.
#pragma once

#include <cmath>

#include "attention.h"

namespace pointsman {

// head / root mean square * weight, float32.
inline void norm_head(const float* head, int64_t width, const float* weight, float epsilon,
                      float* target) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t at = 0; at < width; at += 16) {
    const __m512 values = _mm512_maskz_loadu_ps(mask16(width - at), head + at);
    squares = _mm512_fmadd_ps(values, values, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + epsilon));
  for (int64_t at = 0; at < width; at += 16) {
    const __mmask16 mask = mask16(width - at);
    const __m512 values = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, head + at), scale);
    _mm512_mask_storeu_ps(target + at, mask,
                          _mm512_mul_ps(values, _mm512_maskz_loadu_ps(mask, weight + at)));
  }
}

// Rotates the first `num_rotated` elements, narrows all `width`. angles: cosines, then sines.
inline void rotate_head(const float* head, int64_t width, int64_t num_rotated, const float* angles,
                        bf16* target) {
  const int64_t half = num_rotated / 2;
  for (int64_t at = 0; at < half; at += 16) {
    const __mmask16 mask = mask16(half - at);
    const __m512 first = _mm512_maskz_loadu_ps(mask, head + at);
    const __m512 second = _mm512_maskz_loadu_ps(mask, head + half + at);
    const __m512 cosines = _mm512_maskz_loadu_ps(mask, angles + at);
    const __m512 sines = _mm512_maskz_loadu_ps(mask, angles + half + at);
    store_narrow(target + at, mask,
                 _mm512_fnmadd_ps(second, sines, _mm512_mul_ps(first, cosines)));
    store_narrow(target + half + at, mask,
                 _mm512_fmadd_ps(first, sines, _mm512_mul_ps(second, cosines)));
  }
  for (int64_t at = num_rotated; at < width; at += 16) {
    const __mmask16 mask = mask16(width - at);
    store_narrow(target + at, mask, _mm512_maskz_loadu_ps(mask, head + at));
  }
}

// qkv: float32 [row][query heads, key heads, value heads]. queries: bf16 [row][query heads].
inline void rotate_and_store(const Layer& layer, const Step& step, const float* qkv,
                             bf16* queries) {
  constexpr int64_t kRowsPerTask = 4;
  constexpr int64_t kMaxHeadDim = 512;
  const int64_t width = layer.head_dim;
  const int64_t num_all = layer.num_heads + 2 * layer.num_kv_heads;
  const int64_t num_tasks = (step.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  const auto place_of = [&](int64_t row) {
    const int64_t slot = step.slots[row];
    return slot / layer.block_tokens * layer.block_stride +
           slot % layer.block_tokens * layer.token_stride;
  };
  if (step.num_decode_rows > 0) {  // places far apart: fetch them side by side
    for (int64_t at = 0; at < step.num_decode_rows; ++at) {
      const int64_t place = place_of(step.decode_rows[2 * at]);
      for (int64_t part = 0; part < layer.token_stride; part += 32) {
        __builtin_prefetch(layer.keys + place + part, 1);
        __builtin_prefetch(layer.values + place + part, 1);
      }
    }
  }
  ThreadPool::instance().run_rows(num_tasks, [&](int64_t task) {
    alignas(64) float normed[kMaxHeadDim];
    const int64_t last = std::min(step.num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < last; ++row) {
      const float* angles = step.rope + step.positions[row] * layer.num_rotated;
      const int64_t place = place_of(row);
      for (int64_t number = 0; number < num_all; ++number) {
        const float* head = qkv + (row * num_all + number) * width;
        const int64_t key = number - layer.num_heads;
        const int64_t value = key - layer.num_kv_heads;
        bf16* target = key < 0     ? queries + (row * layer.num_heads + number) * width
                       : value < 0 ? layer.keys + place + key * width
                                   : layer.values + place + value * width;
        const float* weight = key < 0 ? layer.query_norm : value < 0 ? layer.key_norm : nullptr;
        if (weight) {
          norm_head(head, width, weight, layer.norm_epsilon, normed);
          head = normed;
        }
        rotate_head(head, width, value < 0 ? layer.num_rotated : 0, angles, target);
      }
    }
  });
}

}  // namespace pointsman
