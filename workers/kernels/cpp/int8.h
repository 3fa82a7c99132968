// Products of int8 weights: rows are rounded to int8 too, in groups of 64 inputs with a scale each,
// so that an outlier costs its own group alone. Weights have one scale per column.
//
// Sums within a group are whole numbers, and groups are added in order: a row's result does not
// depend on the rows computed with it.
#pragma once

#include <bit>

#include "attention.h"
#include "panel.h"

namespace pointsman {

// So many rows at once leave registers for whole sums and for totals.
constexpr int64_t kMaxInt8Rows = 8;

// Rows in int8, in groups as the products take them, [slice][rows of the group][64], so that one
// address reaches them all; scales are [slice][rows of the group].
// Weights are stored plus 128, because the instruction takes unsigned times signed: a row's total
// begins with its offset, -128 times the sum of its rounded inputs.
struct Int8Rows {
  RowGroups groups;
  int64_t num_slices;
  const int8_t* values;
  const float* scales;
  const float* offsets;
};

// At most 64 bf16 of a row; what is missing counts as zero. Returns the scale and adds to `offset`,
// whose lanes are to be summed. With one that is no number none of the row's results is one: its
// scale is not.
inline float round_slice(const bf16* inputs, int64_t count, int8_t* values, __m512& offset) {
  const __m512i first = _mm512_maskz_loadu_epi16(mask32(count), inputs);
  const __m512i second = _mm512_maskz_loadu_epi16(mask32(count - 32), inputs + 32);
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);  // of bf16: in the order of whole numbers
  const __m512i both = _mm512_max_epu16(_mm512_and_si512(first, magnitude),
                                        _mm512_and_si512(second, magnitude));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(both),
                                        _mm512_extracti64x4_epi64(both, 1));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half),
                                      _mm256_extracti128_si256(half, 1));
  const int largest = 0xFFFF & ~_mm_cvtsi128_si32(_mm_minpos_epu16(~eight));
  const float top = std::bit_cast<float>(largest << 16);
  const __m512 factor = _mm512_set1_ps(top > 0 ? 127.0f / top : 0.0f);
  const auto rounded = [&](__m256i part) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(widen(part), factor));
  };
  // Packing goes by quarters of a register.
  const __m512i packed = _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
      _mm512_packs_epi16(_mm512_packs_epi32(rounded(_mm512_castsi512_si256(first)),
                                            rounded(_mm512_extracti64x4_epi64(first, 1))),
                         _mm512_packs_epi32(rounded(_mm512_castsi512_si256(second)),
                                            rounded(_mm512_extracti64x4_epi64(second, 1)))));
  _mm512_storeu_si512(values, packed);
  const float scale = top / 127.0f;
  const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), packed);
  offset = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(-128.0f * scale), offset);
  return scale;
}

// `inputs`: bf16 [num_rows][num_inputs]. What it gives is good until the thread's next call.
inline Int8Rows round_rows(const RowGroups& groups, const bf16* inputs, int64_t num_inputs) {
  static thread_local Scratch<int8_t> value_scratch;
  static thread_local Scratch<float> scale_scratch;
  static thread_local Scratch<float> offset_scratch;
  const int64_t num_slices = (num_inputs + kSliceInputs - 1) / kSliceInputs;
  const int64_t width = num_slices * kSliceInputs;
  int8_t* values = value_scratch.get(groups.num_rows * width);
  float* scales = scale_scratch.get(groups.num_rows * num_slices);
  float* offsets = offset_scratch.get(groups.num_rows);
  ThreadPool::instance().run_rows(groups.count, [&](int64_t group) {
    const int64_t first = groups.first(group), count = groups.size(group);
    for (int64_t row = 0; row < count; ++row) {
      __m512 offset = _mm512_setzero_ps();
      for (int64_t slice = 0; slice < num_slices; ++slice) {
        const int64_t input = slice * kSliceInputs;
        scales[first * num_slices + slice * count + row] =
            round_slice(inputs + (first + row) * num_inputs + input, num_inputs - input,
                        values + first * width + (input * count + row * kSliceInputs), offset);
      }
      offsets[first + row] = _mm512_reduce_add_ps(offset);
    }
  });
  return {groups, num_slices, values, scales, offsets};
}

// Adds a panel's products with a group of rows to totals, which begin with the rows' offsets. A
// function of its own, so that both kinds of sums stay in registers.
template <int Rows, bool IsAlone>
__attribute__((noinline)) void add_int8_products(const Int8Rows& rows, int64_t first,
                                                 const uint8_t* columns, Ahead<IsAlone> ahead,
                                                 Floats (&results)[Rows][2]) {
  const int8_t* values = rows.values + first * rows.num_slices * kSliceInputs;
  const float* scales = rows.scales + first * rows.num_slices;
  Floats totals[Rows][2];
  for (int row = 0; row < Rows; ++row) {
    totals[row][0] = totals[row][1] = (Floats)_mm512_set1_ps(rows.offsets[first + row]);
  }
  for (int64_t slice = 0; slice < rows.num_slices; ++slice, scales += Rows) {
    ahead.before_slice();
    Ints sums[Rows][2];
    for (int row = 0; row < Rows; ++row) sums[row][0] = sums[row][1] = Ints{};
    for (int64_t four = 0; four < kSliceInputs / 4; ++four) {
      ahead.before_step();
      const __m512i left = _mm512_loadu_si512(columns);
      const __m512i right = _mm512_loadu_si512(columns + 64);
      for (int row = 0; row < Rows; ++row) {
        const __m512i inputs =
            _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(values + row * kSliceInputs));
        sums[row][0] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[row][0], left, inputs);
        sums[row][1] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[row][1], right, inputs);
      }
      columns += 4 * kPanelColumns;
      values += 4;
    }
    values += (Rows - 1) * kSliceInputs;
    for (int row = 0; row < Rows; ++row) {
      const __m512 scale = _mm512_set1_ps(scales[row]);
      for (int half = 0; half < 2; ++half) {
        const __m512 whole = _mm512_cvtepi32_ps((__m512i)sums[row][half]);
        totals[row][half] = (Floats)_mm512_fmadd_ps(whole, scale, (__m512)totals[row][half]);
      }
    }
  }
  for (int row = 0; row < Rows; ++row) {
    results[row][0] = totals[row][0];
    results[row][1] = totals[row][1];
  }
}

// Sums of rows [first, first + Rows), one group of `rows`, over one panel.
template <int Rows, bool IsAlone>
void sum_int8_rows(const Int8Rows& rows, int64_t first, const uint8_t* panel,
                   const float* column_scales, const float* bias, Ahead<IsAlone> ahead,
                   __m512 (&results)[Rows][2]) {
  Floats totals[Rows][2];
  add_int8_products<Rows, IsAlone>(rows, first, panel, ahead, totals);
  for (int half = 0; half < 2; ++half) {
    const __m512 scale = _mm512_loadu_ps(column_scales + 16 * half);
    const __m512 own_bias = bias ? _mm512_loadu_ps(bias + 16 * half) : _mm512_setzero_ps();
    for (int row = 0; row < Rows; ++row) {
      results[row][half] = _mm512_fmadd_ps((__m512)totals[row][half], scale, own_bias);
    }
  }
}

}  // namespace pointsman
