// Threads that tell XLA that an operation has ended.

#ifndef JDELTA_SPILL_COMPLETER_H_
#define JDELTA_SPILL_COMPLETER_H_

#include <functional>

namespace jdelta {

// Runs `work` soon, on a thread that nothing else waits for. XLA goes on with the program on the
// thread that completes an operation, so that thread may compute, or wait for other devices, for as
// long as the program runs: the threads of a store must not be lent out for that.
void Complete(std::function<void()> work);

// To be called before that, on a thread of the priority that `work` is to have.
void PrepareToComplete();

}  // namespace jdelta

#endif  // JDELTA_SPILL_COMPLETER_H_
