// bfloat16 and float32 in AVX-512 registers. Ends of rows are masked, so any even width works.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

namespace pointsman {

using bf16 = uint16_t;
// What __m512i and __m512 are, but GCC keeps arrays of these in registers and spills those.
using Ints = int32_t __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Mask of the first `count` of 16 (32) lanes; none below zero, all from 16 (32) on.
inline __mmask16 mask16(int64_t count) {
  return count >= 16 ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}
inline __mmask32 mask32(int64_t count) {
  return count >= 32 ? 0xFFFFFFFFu : count <= 0 ? 0 : static_cast<__mmask32>((1ull << count) - 1);
}

inline __m512 widen(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline void store_narrow(bf16* target, __mmask16 mask, __m512 values) {
  _mm256_mask_storeu_epi16(target, mask, narrow(values));
}

inline __m512bh load_bf16(const bf16* source, __mmask32 mask) {
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, source);
}

// Two neighbouring bfloat16 of a row, in all lanes.
inline __m512bh broadcast_pair(const bf16* source) {
  return (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(source));
}

// 2 to the power of x; relative error below 2e-7 for x <= 0. Minus infinity gives zero.
inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-150.0f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(1.53533619e-4f);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.33988742e-3f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.61843736e-3f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.55032574e-2f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.40226522e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93147182e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

inline __m512 silu(__m512 x) {
  const __m512 power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
  return _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1.0f)));
}

// Lane i of the result is the sum of the lanes of rows[i].
inline __m512 sum_each(const __m512 (&rows)[16]) {
  __m512 pairs[8];
  for (int i = 0; i < 8; ++i) {
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                             _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
  }
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const __m512d left = _mm512_castps_pd(pairs[2 * i]);
    const __m512d right = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  }
  __m512 halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xDD));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                       _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

// Exchanges rows and columns of 16 x 16 values of 32 bits.
inline void transpose(__m512i (&rows)[16]) {
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    const __m512i b = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]);
    const __m512i d = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
    rows[i] = _mm512_unpacklo_epi64(a, c);
    rows[i + 1] = _mm512_unpackhi_epi64(a, c);
    rows[i + 2] = _mm512_unpacklo_epi64(b, d);
    rows[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  for (int i = 0; i < 4; ++i) {  // quarters: those of even number, then those of odd
    const __m512i a = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xDD);
    const __m512i c = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xDD);
    rows[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
    rows[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
}

}  // namespace pointsman
