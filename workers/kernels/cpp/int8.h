// Products of int8 weights: rows are rounded to int8 too, in groups of 64 inputs with a scale each,
// so that an outlier costs its own group alone. Weights have one scale per column.
//
// Sums within a group are whole numbers, and groups are added in order: a row's result does not
// depend on the rows computed with it.
#pragma once

#include <limits>

#include "attention.h"
#include "panel.h"

namespace pointsman {

constexpr int64_t kGroupInputs = 64;
// One or two rows are through with a panel of int8 so fast that they take a tenth longer with more.
template <int Rows>
constexpr int64_t kInt8AheadBytes = Rows <= 2 ? 2 << 10 : kAheadBytes;

using Ints = int32_t __attribute__((vector_size(64)));  // GCC spills arrays of __m512i

// Rows in int8, in groups as the products take them, [fours of inputs][rows of the group][4], so that
// one address reaches them all. For each 64 inputs and row, [inputs][rows of the group], a scale, and
// -128 times their sum: weights are stored plus 128, because the instruction takes unsigned times signed.
struct Int8Rows {
  int64_t num_groups;  // of inputs
  const int8_t* values;
  const float* scales;
  const int32_t* offsets;
};

// A group of at most 64 bf16 of a row, of which fours lie `stride` bytes apart; what is missing
// counts as zero. With one that is no number none of the row's results is one: its scale is not.
inline void round_group(const bf16* inputs, int64_t count, int8_t* values, int64_t stride,
                        float* scale, int32_t* offset) {
  __m512 parts[4], largest = _mm512_setzero_ps();
  __mmask16 unordered = 0;
  for (int part = 0; part < 4; ++part) {
    const __mmask16 mask = mask16(count - 16 * part);
    parts[part] = widen(_mm256_maskz_loadu_epi16(mask, inputs + 16 * part));
    largest = _mm512_max_ps(largest, _mm512_abs_ps(parts[part]));
    unordered |= _mm512_cmp_ps_mask(parts[part], parts[part], _CMP_UNORD_Q);
  }
  const float top = _mm512_reduce_max_ps(largest);
  const __m512 factor = _mm512_set1_ps(top > 0 ? 127.0f / top : 0.0f);
  __m512i sum = _mm512_setzero_si512();
  alignas(16) int32_t fours[kGroupInputs / 4];
  for (int part = 0; part < 4; ++part) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(parts[part], factor));
    sum = _mm512_add_epi32(sum, whole);
    _mm_store_si128(reinterpret_cast<__m128i*>(fours + 4 * part), _mm512_cvtepi32_epi8(whole));
  }
  for (int four = 0; four < kGroupInputs / 4; ++four) {
    *reinterpret_cast<int32_t*>(values + four * stride) = fours[four];
  }
  *scale = unordered ? std::numeric_limits<float>::quiet_NaN() : top / 127.0f;
  *offset = -128 * _mm512_reduce_add_epi32(sum);
}

// `inputs`: bf16 [num_rows][num_inputs]. What it gives is good until the thread's next call.
inline Int8Rows round_rows(const bf16* inputs, int64_t num_rows, int64_t num_inputs) {
  static thread_local Scratch<int8_t> value_scratch;
  static thread_local Scratch<float> scale_scratch;
  static thread_local Scratch<int32_t> offset_scratch;
  const int64_t num_groups = (num_inputs + kGroupInputs - 1) / kGroupInputs;
  const int64_t width = num_groups * kGroupInputs;
  int8_t* values = value_scratch.get(num_rows * width);
  float* scales = scale_scratch.get(num_rows * num_groups);
  int32_t* offsets = offset_scratch.get(num_rows * num_groups);
  const RowGroups groups(num_rows);
  ThreadPool::instance().run(groups.count, [&](int64_t number) {
    const int64_t first = groups.first(number), count = groups.first(number + 1) - first;
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t at = first * num_groups + group * count + row, input = group * kGroupInputs;
        round_group(inputs + (first + row) * num_inputs + input, num_inputs - input,
                    values + first * width + input * count + 4 * row, 4 * count, scales + at,
                    offsets + at);
      }
    }
  });
  return {num_groups, values, scales, offsets};
}

// Adds the products of one group of inputs. `columns`: [fours of inputs][32 columns][4]. A function of
// its own, so that the sums stay in registers; offsets come last, or they would go there by way of
// memory.
template <int Rows, bool Streams>
__attribute__((noinline)) void add_int8_group(const int8_t* values, const uint8_t* columns,
                                              const int32_t* offsets, const float* scales,
                                              __m512 (&totals)[Rows][2]) {
  Ints sums[Rows][2];
  for (int row = 0; row < Rows; ++row) sums[row][0] = sums[row][1] = Ints{};
  for (int64_t four = 0; four < kGroupInputs / 4; ++four, columns += 4 * kPanelColumns) {
    if constexpr (Streams) {  // as in add_products
      const char* ahead = reinterpret_cast<const char*>(columns) + kInt8AheadBytes<Rows>;
      _mm_prefetch(ahead, _MM_HINT_T0);
      _mm_prefetch(ahead + 64, _MM_HINT_T0);
    }
    const __m512i left = _mm512_loadu_si512(columns);
    const __m512i right = _mm512_loadu_si512(columns + 64);
    for (int row = 0; row < Rows; ++row) {
      const __m512i inputs =
          _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(values + 4 * (four * Rows + row)));
      sums[row][0] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[row][0], left, inputs);
      sums[row][1] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[row][1], right, inputs);
    }
  }
  for (int row = 0; row < Rows; ++row) {
    const __m512 scale = _mm512_set1_ps(scales[row]);
    const __m512i offset = _mm512_set1_epi32(offsets[row]);
    for (int half = 0; half < 2; ++half) {
      const __m512i whole = _mm512_add_epi32((__m512i)sums[row][half], offset);
      totals[row][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, totals[row][half]);
    }
  }
}

// Sums of rows [first, first + Rows), one group of `rows`, over one panel.
template <int Rows, bool Streams>
void sum_int8_rows(const Int8Rows& rows, int64_t first, const uint8_t* panel,
                   const float* column_scales, const float* bias, __m512 (&results)[Rows][2]) {
  const __m512 zero = _mm512_setzero_ps();
  for (int row = 0; row < Rows; ++row) results[row][0] = results[row][1] = zero;
  const int8_t* values = rows.values + first * rows.num_groups * kGroupInputs;
  for (int64_t group = 0; group < rows.num_groups; ++group) {
    const int64_t at = first * rows.num_groups + group * Rows, input = group * kGroupInputs;
    add_int8_group<Rows, Streams>(values + input * Rows, panel + input * kPanelColumns,
                                  rows.offsets + at, rows.scales + at, results);
  }
  const __m512 left_scale = _mm512_loadu_ps(column_scales);
  const __m512 right_scale = _mm512_loadu_ps(column_scales + 16);
  const __m512 left_bias = bias ? _mm512_loadu_ps(bias) : zero;
  const __m512 right_bias = bias ? _mm512_loadu_ps(bias + 16) : zero;
  for (int row = 0; row < Rows; ++row) {
    results[row][0] = _mm512_fmadd_ps(results[row][0], left_scale, left_bias);
    results[row][1] = _mm512_fmadd_ps(results[row][1], right_scale, right_bias);
  }
}

}  // namespace pointsman
