#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "adapter.h"

namespace jdelta {
namespace {

class DiskAdapter : public Adapter {
 public:
  explicit DiskAdapter(int file) : file_(file) { SetDirect(true); }
  ~DiskAdapter() override { close(file_); }

  Status Write(int64_t extent, const Block& block, size_t bytes) override {
    return Whole(extent, bytes, [this, &block](size_t done, size_t left, off_t at) {
      return pwrite(file_, block.get() + done, left, at);
    });
  }

  Status Read(int64_t extent, Block& block, size_t bytes) override {
    return Whole(extent, bytes, [this, &block](size_t done, size_t left, off_t at) {
      return pread(file_, block.get() + done, left, at);
    });
  }

 private:
  // Calls `move` until all is moved, however it cuts it up.
  template <typename Move>
  Status Whole(int64_t extent, size_t bytes, Move move) {
    size_t done = 0;
    while (done < Aligned(bytes)) {
      off_t at = static_cast<off_t>(extent * kBlockBytes + done);
      ssize_t moved = move(done, Aligned(bytes) - done, at);
      if (moved > 0) {
        done += moved;
      } else if (moved == 0) {
        return "the file ends early: something else has cut it";
      } else if (errno == EINVAL && SetDirect(false)) {
        continue;  // the file system took the flag but not the transfer
      } else if (errno != EINTR) {
        return Explain(errno);
      }
    }
    return Status();
  }

  // Whether that changed anything.
  bool SetDirect(bool direct) {
#ifdef O_DIRECT
    int flags = fcntl(file_, F_GETFL);
    int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
    return wanted != flags && fcntl(file_, F_SETFL, wanted) == 0;
#else
    return false;
#endif
  }

  int file_;
};

const char* Advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "; make room there, or spill less";
    case EACCES:
    case EPERM:
    case EROFS:
      return "; choose a directory that this user may write to";
    default:
      return "; see the system's log, and try another directory";
  }
}

}  // namespace

Status Explain(int error) { return std::strerror(error) + Status(Advice(error)); }

std::unique_ptr<Adapter> NewDiskAdapter(int file) { return std::make_unique<DiskAdapter>(file); }

}  // namespace jdelta
