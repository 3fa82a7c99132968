// Attention of spans of prompt tokens to their contexts: bound by multiplication.
//
// A context is packed once per step into panels, in tiles of 128 positions that start at multiples
// of 128; rows of (token, head of the group) then take the tiles in order with a running maximum
// (FlashAttention, Dao et al., 2022). A row's result depends on its own context alone: not on the
// chunk it came in, nor on the rows computed with it.
#pragma once

#include "attention.h"

namespace pointsman {

constexpr int64_t kTileTokens = 128;
constexpr int64_t kPackAheadTokens = 48;  // fetched before they are packed

// Elements of one packed tile of one kv head: keys, then values.
inline int64_t keys_size(const Layer& layer) { return layer.head_dim * kTileTokens; }
inline int64_t tile_size(const Layer& layer) {
  return (layer.head_dim + layer.padded_dim()) * kTileTokens;
}

struct Span {
  const int32_t* table;
  int64_t first_row;
  int64_t num_rows;
  int64_t position;    // of the first row
  int64_t first_tile;  // the first that any row sees
  int64_t num_tiles;

  Span(const Layer& layer, const Step& step, int64_t number) {
    const int32_t* fields = step.prefill_spans + 3 * number;
    table = step.block_tables + fields[0] * step.table_width;
    first_row = fields[1];
    num_rows = fields[2];
    position = step.positions[first_row];
    first_tile = layer.first_visible(position) / kTileTokens;
    num_tiles = (position + num_rows + kTileTokens - 1) / kTileTokens - first_tile;
  }
  int64_t context_tokens() const { return position + num_rows; }
  // The sixteen tokens at `token`, a multiple of 16, or the last of the context.
  int64_t sixteen_at(int64_t token) const {
    return std::min(token, (context_tokens() - 1) / 16 * 16);
  }
};

// One kv head's context of a span, packed.
struct HeadContext {
  const Span& span;
  int64_t kv_head;
  const bf16* tiles;
};

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

// Asks for the keys, or the values, of one head and 16 tokens: pieces too short for a core to see a
// stream in them.
inline void fetch_tokens(const Layer& layer, const bf16* tokens) {
  for (int64_t token = 0; token < 16; ++token) {
    const bf16* head = tokens + token * layer.token_stride;
    for (int64_t at = 0; at < layer.head_dim; at += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(head + at), _MM_HINT_T0);
    }
  }
}

// One tile of one kv head: keys, then values. Places after the context are zero.
inline void pack_tile(const Layer& layer, const Span& span, int64_t tile, int64_t kv_head,
                      bf16* keys, bf16* values) {
  const int64_t first = tile * kTileTokens, panel_size = layer.head_dim * kPanelColumns;
  const int64_t end = std::min(span.context_tokens(), first + kTileTokens);
  for (int64_t token = first; token < end; token += 16) {
    const int64_t offset = token_offset(layer, span.table, token) + kv_head * layer.head_dim;
    const int64_t at = token - first;
    const int64_t ahead = span.sixteen_at(token + kPackAheadTokens);
    const int64_t next = token_offset(layer, span.table, ahead) + kv_head * layer.head_dim;
    fetch_tokens(layer, layer.keys + next);
    fetch_tokens(layer, layer.values + next);
    pack_keys(layer.keys + offset, layer.token_stride, layer.head_dim,
              keys + at / kPanelColumns * panel_size + at % kPanelColumns * 2);
    for (int64_t pair = 0; pair < 8; ++pair) {
      const bf16* source = layer.values + offset + 2 * pair * layer.token_stride;
      for (int64_t chunk = 0; chunk < layer.num_chunks(); ++chunk) {
        const __mmask32 mask = mask32(layer.head_dim - 32 * chunk);
        const __mmask32 first_mask = token + 2 * pair < end ? mask : 0;
        const __mmask32 second_mask = token + 2 * pair + 1 < end ? mask : 0;
        pack_value_pair(source + 32 * chunk, source + layer.token_stride + 32 * chunk, first_mask,
                        second_mask, values + chunk * kTileTokens * kPanelColumns + at * 32 + pair * 64);
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

// Up to 12 rows of one kv head's group and their running softmax.
template <int Rows>
struct RowGroup {
  explicit RowGroup(const Layer& of_layer) : layer(of_layer) {}

  const Layer& layer;
  alignas(64) float scores[Rows][kTileTokens];
  alignas(64) bf16 weights[Rows][kTileTokens];
  __m512 sums[Rows];
  float maxima[Rows];
  float factors[Rows];
  int64_t first_visible[Rows];
  int64_t context_tokens[Rows];
  bf16* queries;  // [Rows][head_dim]
  float* values;  // [Rows][padded_dim]

  void score(const bf16* keys, int64_t num_panels) {
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      __m512 products[Rows][2];
      for (int row = 0; row < Rows; ++row) products[row][0] = products[row][1] = _mm512_setzero_ps();
      add_products<Rows>(queries, layer.head_dim, keys + panel * layer.head_dim * kPanelColumns,
                         layer.head_dim / 2, Ahead<false>{}, products);
      for (int row = 0; row < Rows; ++row) {
        _mm512_store_ps(scores[row] + panel * kPanelColumns, products[row][0]);
        _mm512_store_ps(scores[row] + panel * kPanelColumns + 16, products[row][1]);
      }
    }
  }

  // Scores of the tile's first `num_tokens` become weights; sets the row's factor.
  void weigh(int row, int64_t first, int64_t num_tokens) {
    const int64_t begin = first_visible[row] - first, end = context_tokens[row] - first;
    if (end <= 0 || begin >= num_tokens) {
      std::fill(weights[row], weights[row] + num_tokens, bf16{0});
      factors[row] = 1.0f;
      return;
    }
    __m512 largest = _mm512_set1_ps(kMinusInfinity);
    for (int64_t at = 0; at < num_tokens; at += 16) {
      __m512 part = _mm512_load_ps(scores[row] + at);
      if (begin > at || end < at + 16) {
        const __mmask16 mask = mask16(end - at) & static_cast<__mmask16>(~mask16(begin - at));
        part = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), mask, part);
        _mm512_store_ps(scores[row] + at, part);
      }
      largest = _mm512_max_ps(largest, part);
    }
    const float before = maxima[row];
    const float maximum = std::max(before, _mm512_reduce_max_ps(largest) * layer.scale);
    const __m512 scale = _mm512_set1_ps(layer.scale), top = _mm512_set1_ps(maximum);
    factors[row] = before == maximum ? 1.0f : _mm512_cvtss_f32(exp2(_mm512_set1_ps(before - maximum)));
    __m512 sum = _mm512_mul_ps(sums[row], _mm512_set1_ps(factors[row]));
    for (int64_t at = 0; at < num_tokens; at += 16) {
      const __m512 weight = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores[row] + at), scale, top));
      sum = _mm512_add_ps(sum, weight);
      store_narrow(weights[row] + at, 0xFFFF, weight);
    }
    sums[row] = sum;
    maxima[row] = maximum;
  }

  void add_values(const bf16* packed, int64_t num_tokens) {
    const int64_t stride = layer.padded_dim();
    for (int64_t chunk = 0; chunk < layer.num_chunks(); ++chunk) {
      __m512 products[Rows][2];
      for (int row = 0; row < Rows; ++row) {
        const __m512 factor = _mm512_set1_ps(factors[row]);
        const float* place = values + row * stride + 32 * chunk;
        products[row][0] = _mm512_mul_ps(_mm512_load_ps(place), factor);
        products[row][1] = _mm512_mul_ps(_mm512_load_ps(place + 16), factor);
      }
      add_products<Rows>(weights[0], kTileTokens, packed + chunk * kTileTokens * kPanelColumns,
                         num_tokens / 2, Ahead<false>{}, products);
      for (int row = 0; row < Rows; ++row) {
        _mm512_store_ps(values + row * stride + 32 * chunk, products[row][0]);
        _mm512_store_ps(values + row * stride + 32 * chunk + 16, products[row][1]);
      }
    }
  }
};

// Rows [first, first + Rows) of a span's (token, head of the group) pairs, token by token.
template <int Rows>
void attend_rows(const Layer& layer, const HeadContext& head_context, int64_t first,
                 const bf16* queries, bf16* target) {
  const Span& span = head_context.span;
  static thread_local Scratch<bf16> query_scratch;
  static thread_local Scratch<float> value_scratch;
  const int64_t width = layer.head_dim, stride = layer.padded_dim();
  RowGroup<Rows> group(layer);
  group.queries = query_scratch.get(Rows * width);
  group.values = value_scratch.get(Rows * stride);
  std::fill(group.values, group.values + Rows * stride, 0.0f);
  int64_t places[Rows];
  for (int row = 0; row < Rows; ++row) {
    const int64_t token = (first + row) / layer.group_size();
    const int64_t head = head_context.kv_head * layer.group_size() + (first + row) % layer.group_size();
    places[row] = ((span.first_row + token) * layer.num_heads + head) * width;
    std::copy_n(queries + places[row], width, group.queries + row * width);
    group.context_tokens[row] = span.position + token + 1;
    group.first_visible[row] = layer.first_visible(span.position + token);
    group.maxima[row] = kMinusInfinity;
    group.sums[row] = _mm512_setzero_ps();
  }
  const int64_t context = group.context_tokens[Rows - 1];
  int64_t tile = group.first_visible[0] / kTileTokens;
  for (; tile * kTileTokens < context; ++tile) {
    const bf16* keys = head_context.tiles + (tile - span.first_tile) * tile_size(layer);
    const int64_t left = context - tile * kTileTokens;
    const int64_t num_panels = (std::min(left, kTileTokens) + kPanelColumns - 1) / kPanelColumns;
    const int64_t num_tokens = num_panels * kPanelColumns;
    group.score(keys, num_panels);
    for (int row = 0; row < Rows; ++row) group.weigh(row, tile * kTileTokens, num_tokens);
    group.add_values(keys + keys_size(layer), num_tokens);
  }
  for (int row = 0; row < Rows; ++row) {
    const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(group.sums[row]));
    for (int64_t at = 0; at < width; at += 16) {
      const __m512 part = _mm512_load_ps(group.values + row * stride + at);
      store_narrow(target + places[row] + at, mask16(width - at), _mm512_mul_ps(part, inverse));
    }
  }
}

// queries, target: bf16 [row][query heads][head_dim].
inline void attend_prefill(const Layer& layer, const Step& step, const bf16* queries,
                           bf16* target) {
  if (step.num_prefill_spans == 0) return;
  // Few rows are shared out head by head, as their contexts were packed: each thread then reads what
  // it packed itself. Many rows keep to the threads of their other operators.
  constexpr int64_t kFewRows = 16;  // per thread
  const bool has_few_rows = step.num_rows < kFewRows * ThreadPool::instance().num_threads();
  const int64_t rows_per_task = has_few_rows ? kMaxRows : 4 * kMaxRows;
  static thread_local Scratch<bf16> packed_scratch;
  static thread_local Scratch<int64_t> number_scratch;
  const int64_t num_spans = step.num_prefill_spans, kv_heads = layer.num_kv_heads;
  int64_t* tiles = number_scratch.get(2 * (num_spans + 1));  // numbers of first tiles ...
  int64_t* tasks = tiles + num_spans + 1;                    // ... and of first tasks
  tiles[0] = tasks[0] = 0;
  const auto tasks_per_head = [&](const Span& span) {
    return (span.num_rows * layer.group_size() + rows_per_task - 1) / rows_per_task;
  };
  for (int64_t at = 0; at < num_spans; ++at) {
    const Span span(layer, step, at);
    tiles[at + 1] = tiles[at] + span.num_tiles * kv_heads;
    tasks[at + 1] = tasks[at] + tasks_per_head(span) * kv_heads;
  }
  bf16* packed = packed_scratch.get(tiles[num_spans] * tile_size(layer));
  const auto find = [&](const int64_t* starts, int64_t number) {
    return std::upper_bound(starts, starts + num_spans + 1, number) - starts - 1;
  };
  ThreadPool::instance().run(tiles[num_spans], [&](int64_t task) {
    const int64_t at = find(tiles, task), number = task - tiles[at];
    const Span span(layer, step, at);
    bf16* keys = packed + task * tile_size(layer);
    pack_tile(layer, span, span.first_tile + number % span.num_tiles, number / span.num_tiles, keys,
              keys + keys_size(layer));
  });
  ThreadPool::instance().run(tasks[num_spans], [&](int64_t task) {
    const int64_t at = find(tasks, task), own = task - tasks[at];
    const Span span(layer, step, at);
    const int64_t num_parts = tasks_per_head(span);
    const int64_t kv_head = has_few_rows ? own / num_parts : own % kv_heads;
    const int64_t begin = (has_few_rows ? own % num_parts : own / kv_heads) * rows_per_task;
    const int64_t end = std::min(begin + rows_per_task, span.num_rows * layer.group_size());
    const HeadContext context{
        span, kv_head, packed + (tiles[at] + kv_head * span.num_tiles) * tile_size(layer)};
    for (int64_t row = begin; row < end; row += kMaxRows) {
      with_rows(static_cast<int>(std::min<int64_t>(kMaxRows, end - row)), [&]<int Rows>() {
        attend_rows<Rows>(layer, context, row, queries, target);
      });
    }
  });
}

}  // namespace pointsman
