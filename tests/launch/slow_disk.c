/* Loaded in front of the C library (LD_PRELOAD): the disk under SLOW_DISK behaves like a network's.

   SLOW_DISK_NEGATIVE=SECONDS  a name that was looked for in vain is not looked for again for so long: each process is a
                               client of its own, which keeps what it knows, as NFS does (acdirmin is 30 s)
   SLOW_DISK_HANGS=FILE        while FILE exists, on the nodes that it names (all, if it is empty), no call returns */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NAMES 4096
#define FILES 65536
static struct { char path[512]; double until; } missing[NAMES];
static char ours[FILES];
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int is_ours(int dir, const char *path, char *full, size_t size) {
    const char *folder = getenv("SLOW_DISK");
    if (!folder || !path) return 0;
    if (path[0] != '/') {
        if (dir != AT_FDCWD || !getcwd(full, size)) return 0;
        strncat(full, "/", size - strlen(full) - 1);
        strncat(full, path, size - strlen(full) - 1);
    } else snprintf(full, size, "%s", path);
    return strncmp(full, folder, strlen(folder)) == 0;
}

static void hang(void) {
    const char *file = getenv("SLOW_DISK_HANGS");
    char host[64] = "", text[256];
    if (!file) return;
    for (;;) {
        int fd = syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return;
        ssize_t size = syscall(SYS_read, fd, text, sizeof text - 1);
        syscall(SYS_close, fd);
        text[size > 0 ? size : 0] = 0;
        gethostname(host, sizeof host);
        if (text[0] && !strstr(text, host)) return;
        usleep(50000);
    }
}

static int is_missing(const char *full) { /* it, or a folder that it is in */
    int found = 0;
    pthread_mutex_lock(&turn);
    for (int i = 0; i < NAMES && missing[i].path[0] && !found; i++) {
        size_t n = strlen(missing[i].path);
        found = missing[i].until > now() && !strncmp(full, missing[i].path, n) && (!full[n] || full[n] == '/');
    }
    pthread_mutex_unlock(&turn);
    return found;
}

static void note(const char *full, int is_there) {
    const char *seconds = getenv("SLOW_DISK_NEGATIVE");
    if (!seconds) return;
    char path[512];
    struct stat s;
    snprintf(path, sizeof path, "%s", full);
    for (char *end = path + strlen(getenv("SLOW_DISK")); !is_there && *end; ) { /* the first part that is not there */
        end = strchr(end + 1, '/') ? strchr(end + 1, '/') : path + strlen(path);
        char rest = *end;
        *end = 0;
        if (syscall(SYS_newfstatat, AT_FDCWD, path, &s, AT_SYMLINK_NOFOLLOW)) break;
        *end = rest;
    }
    pthread_mutex_lock(&turn);
    for (int i = 0; i < NAMES; i++) {
        if (missing[i].path[0] && strcmp(missing[i].path, path)) continue;
        if (is_there && !missing[i].path[0]) break;
        strcpy(missing[i].path, path);
        missing[i].until = is_there ? 0 : now() + atof(seconds);
        break;
    }
    pthread_mutex_unlock(&turn);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define LOOKUP(dir, path, call)                                          \
    char full[4096];                                                     \
    if (!is_ours(dir, path, full, sizeof full)) return call;             \
    hang();                                                              \
    if (is_missing(full)) { errno = ENOENT; return -1; }                 \
    int result = call, error = errno;                                    \
    if (result < 0 && error == ENOENT) note(full, 0);                    \
    errno = error;                                                       \
    return result
#define CREATION(dir, path, call)                                        \
    char full[4096];                                                     \
    if (!is_ours(dir, path, full, sizeof full)) return call;             \
    hang();                                                              \
    int result = call, error = errno;                                    \
    if (result >= 0 || error == EEXIST) note(full, 1);                   \
    errno = error;                                                       \
    return result

static int keep(int fd, int dir, const char *path) {
    char full[4096];
    if (fd >= 0 && fd < FILES) ours[fd] = is_ours(dir, path, full, sizeof full);
    return fd;
}

static int plain_open(int dir, const char *path, int flags, mode_t mode) {
    return keep(syscall(SYS_openat, dir, path, flags, mode), dir, path);
}

static int any_open(int dir, const char *path, int flags, mode_t mode) {
    if (flags & O_CREAT) { CREATION(dir, path, plain_open(dir, path, flags, mode)); }
    LOOKUP(dir, path, plain_open(dir, path, flags, mode));
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }
int open(const char *path, int flags, ...) { MODE return any_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return any_open(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE return any_open(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE return any_open(dir, path, flags, mode); }
int stat(const char *path, struct stat *s) { LOOKUP(AT_FDCWD, path, REAL(stat)(path, s)); }
int stat64(const char *path, struct stat64 *s) { LOOKUP(AT_FDCWD, path, REAL(stat64)(path, s)); }
int lstat(const char *path, struct stat *s) { LOOKUP(AT_FDCWD, path, REAL(lstat)(path, s)); }
int lstat64(const char *path, struct stat64 *s) { LOOKUP(AT_FDCWD, path, REAL(lstat64)(path, s)); }
int fstatat(int dir, const char *path, struct stat *s, int flags) { LOOKUP(dir, path, REAL(fstatat)(dir, path, s, flags)); }
int fstatat64(int dir, const char *path, struct stat64 *s, int flags) { LOOKUP(dir, path, REAL(fstatat64)(dir, path, s, flags)); }
int access(const char *path, int mode) { LOOKUP(AT_FDCWD, path, REAL(access)(path, mode)); }
int statvfs(const char *path, struct statvfs *s) { LOOKUP(AT_FDCWD, path, REAL(statvfs)(path, s)); }
int statvfs64(const char *path, struct statvfs64 *s) { LOOKUP(AT_FDCWD, path, REAL(statvfs64)(path, s)); }
int unlink(const char *path) { LOOKUP(AT_FDCWD, path, REAL(unlink)(path)); }
int utimensat(int dir, const char *path, const struct timespec t[2], int flags) { LOOKUP(dir, path, REAL(utimensat)(dir, path, t, flags)); }
int mkdir(const char *path, mode_t mode) { CREATION(AT_FDCWD, path, REAL(mkdir)(path, mode)); }
int rename(const char *from, const char *path) { CREATION(AT_FDCWD, path, REAL(rename)(from, path)); }
int link(const char *from, const char *path) { CREATION(AT_FDCWD, path, REAL(link)(from, path)); }
ssize_t write(int fd, const void *data, size_t size) {
    if (fd >= 0 && fd < FILES && ours[fd]) hang();
    return syscall(SYS_write, fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    if (fd >= 0 && fd < FILES && ours[fd]) hang();
    return syscall(SYS_pwrite64, fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    if (fd >= 0 && fd < FILES && ours[fd]) hang();
    return syscall(SYS_pwrite64, fd, data, size, at);
}
int fsync(int fd) {
    if (fd >= 0 && fd < FILES && ours[fd]) hang();
    return syscall(SYS_fsync, fd);
}
int close(int fd) {
    if (fd >= 0 && fd < FILES) ours[fd] = 0;
    return syscall(SYS_close, fd);
}
