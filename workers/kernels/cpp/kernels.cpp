// The operators as one C function over plain addresses, so that no header of Python or torch is
// needed to build them. native.py checks types and shapes before it calls.
#include "decode.h"
#include "linear.h"
#include "prefill.h"
#include "rope.h"

namespace pointsman {

// Numbered as in native.py.
enum Kind : int64_t {
  kEmbed = 0,
  kLinear = 1,
  kLinearAdd = 2,
  kGatedLinear = 3,
  kRmsNorm = 4,
  kRotateAndStore = 5,
  kAttendPrefill = 6,
  kAttendDecode = 7,
};

// One operator on the rows of a step. `object` is what the kind takes first. Mirrored in native.py.
struct Instruction {
  Kind kind;
  const void* object;
  const void* input;
  void* output;
};

inline void execute(const Instruction& instruction, const Step& step) {
  const int64_t num_rows = step.num_rows;
  const void* object = instruction.object;
  const auto* inputs = static_cast<const bf16*>(instruction.input);
  const auto* sums = static_cast<const float*>(instruction.input);
  auto* narrow_target = static_cast<bf16*>(instruction.output);
  auto* target = static_cast<float*>(instruction.output);
  const auto& weight = *static_cast<const Weight*>(object);
  const auto& layer = *static_cast<const Layer*>(object);
  switch (instruction.kind) {
    case kEmbed:
      return embed(*static_cast<const Table*>(object), num_rows,
                   static_cast<const int64_t*>(instruction.input), target);
    case kLinear:
      return multiply(weight, num_rows, inputs, Store{target, weight.num_columns});
    case kLinearAdd:
      return multiply(weight, num_rows, inputs, Add{target, weight.num_columns});
    case kGatedLinear:
      return multiply(weight, num_rows, inputs, Gate{narrow_target, weight.num_columns / 2});
    case kRmsNorm:
      return rms_norm(*static_cast<const Norm*>(object), num_rows, sums, narrow_target);
    case kRotateAndStore:
      return rotate_and_store(layer, step, sums, narrow_target);
    case kAttendPrefill:
      return attend_prefill(layer, step, inputs, narrow_target);
    case kAttendDecode:
      return attend_decode(layer, step, inputs, narrow_target);
  }
}

}  // namespace pointsman

extern "C" void pm_run(const pointsman::Instruction* instructions, int64_t num_instructions,
                       const pointsman::Step* step, int64_t num_threads) {
  pointsman::ThreadPool::instance().set_num_threads(static_cast<int>(num_threads));
  for (int64_t at = 0; at < num_instructions; ++at) pointsman::execute(instructions[at], *step);
}
