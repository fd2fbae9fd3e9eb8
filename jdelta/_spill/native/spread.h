// Work that several threads share.

#ifndef JDELTA_SPILL_SPREAD_H_
#define JDELTA_SPILL_SPREAD_H_

#include <cstddef>
#include <functional>

namespace jdelta {

using Work = std::function<void(size_t)>;

// Does `work(i)` for every i below `count`, and returns when all are done.
using Spread = std::function<void(size_t count, const Work& work)>;

void OneAfterTheOther(size_t count, const Work& work);

// On this thread, and on up to `others` that begin with what `schedule` is given; it need not run
// all of that, nor before this returns.
void Share(size_t count, const Work& work, size_t others,
           const std::function<void(std::function<void()>)>& schedule);

}  // namespace jdelta

#endif  // JDELTA_SPILL_SPREAD_H_
