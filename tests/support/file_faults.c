/* Loaded before libc (LD_PRELOAD): counts what a process does to files below one folder, and lets
 * the n-th of these events fail. tests/campaign.py arms it by ctypes and says what it is for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { kNone, kKill, kFull, kBroken, kInterrupt, kInterruptTwice };

static char folder[PATH_MAX];
static long events, chosen;
static int fault;

/* fault_arm("", 0, kNone) disarms. */
void fault_arm(const char* below, long n, int kind) {
  snprintf(folder, sizeof folder, "%s", below);
  events = 0;
  chosen = n;
  fault = kind;
}

long fault_events(void) { return events; }

/* Counts an event; 1 where it must fail, with errno set. */
static int fails(void) {
  long now = ++events;
  if (fault == kFull && now >= chosen) return errno = ENOSPC, 1; /* and stays full */
  if (now == chosen) {
    if (fault == kKill) kill(getpid(), SIGKILL);
    if (fault == kBroken) return errno = EIO, 1;
    if (fault == kInterrupt || fault == kInterruptTwice) raise(SIGINT);
  }
  if (now == chosen + 1 && fault == kInterruptTwice) raise(SIGINT);
  return 0;
}

static int is_ours(const char* path) {
  return folder[0] && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_our_descriptor(int fd) {
  char link[64], path[PATH_MAX];
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return is_ours(path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opened(const char* name, const char* path, int flags, mode_t mode) {
  if ((flags & O_ACCMODE) != O_RDONLY && is_ours(path) && fails()) return -1;
  return ((int (*)(const char*, int, ...))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

#define OPEN(name)                             \
  int name(const char* path, int flags, ...) { \
    va_list rest;                              \
    va_start(rest, flags);                     \
    mode_t mode = va_arg(rest, mode_t);        \
    va_end(rest);                              \
    return opened(#name, path, flags, mode);   \
  }
OPEN(open)
OPEN(open64)

/* A full disk takes half of what is written first. */
ssize_t write(int fd, const void* data, size_t size) {
  if (is_our_descriptor(fd)) {
    int first = fault == kFull && events + 1 == chosen && size > 1;
    if (fails()) return first ? NEXT(write)(fd, data, size / 2) : -1;
  }
  return NEXT(write)(fd, data, size);
}

int fsync(int fd) { return is_our_descriptor(fd) && fails() ? -1 : NEXT(fsync)(fd); }

int rename(const char* from, const char* to) {
  /* A full disk renames and links all the same: there is room in the folder's own block. */
  if (is_ours(to) && fault != kFull && fails()) return -1;
  return NEXT(rename)(from, to);
}

int link(const char* from, const char* to) {
  if (is_ours(to) && fault != kFull && fails()) return -1;
  return NEXT(link)(from, to);
}

int unlink(const char* path) {
  if (is_ours(path) && fault != kFull && fails()) return -1;
  return NEXT(unlink)(path);
}

int mkdir(const char* path, mode_t mode) {
  return is_ours(path) && fails() ? -1 : NEXT(mkdir)(path, mode);
}

int truncate(const char* path, off_t size) {
  if (is_ours(path) && fault != kFull && fails()) return -1;
  return NEXT(truncate)(path, size);
}
