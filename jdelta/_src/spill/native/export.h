// Marks what the library shows to others; all else stays hidden in it.

#ifndef JDELTA_SPILL_EXPORT_H_
#define JDELTA_SPILL_EXPORT_H_

#define JDELTA_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // JDELTA_SPILL_EXPORT_H_
