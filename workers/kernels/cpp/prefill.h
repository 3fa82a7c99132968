// Attention of spans of prompt tokens to their contexts, in one of two forms that give the same bytes:
// for long spans, whose rows share packed contexts, and for short ones, which wait for memory. Either
// keeps aside about what the contexts' keys and values take in one layer; with more than 4 query heads
// to a kv head the form for short spans keeps more, up to 4 times that for 16.
#pragma once

#include <numeric>

#include "prefill_long.h"
#include "prefill_short.h"

namespace pointsman {

constexpr int64_t kShortTokens = 64;  // of a span; from some hundred on the other form is faster

// queries, target: bf16 [row][query heads][head_dim].
inline void attend_prefill(const Layer& layer, const Step& step, const bf16* queries, bf16* target) {
  static thread_local Scratch<int64_t> scratch;
  const int64_t num_spans = step.num_prefill_spans;
  if (num_spans == 0) return;
  int64_t* spans = scratch.get(num_spans);  // the short ones first
  std::iota(spans, spans + num_spans, int64_t{0});
  const int64_t* long_ones = std::partition(spans, spans + num_spans, [&](int64_t number) {
    return step.prefill_spans[3 * number + 2] <= kShortTokens;
  });
  // The form for short spans shares out sections: it needs enough of them.
  int64_t num_sections = 0;
  for (const int64_t* number = spans; number < long_ones; ++number) {
    num_sections += ShortSpan(layer, step, *number).num_sections;
  }
  if (num_sections < 2 * ThreadPool::instance().num_threads()) long_ones = spans;
  attend_short(layer, step, spans, long_ones - spans, queries, target);
  attend_long(layer, step, long_ones, spans + num_spans - long_ones, queries, target);
}

}  // namespace pointsman
