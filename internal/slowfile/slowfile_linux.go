// Package slowfile deals with files on file systems that may never answer, such as FUSE and NFS:
// any call about such a file can block for ever, and cannot always be interrupted. Stat recognises
// them without a call to their file systems. Copy copies one in a separate process.
//
// The functions may be called by any number of goroutines.
package slowfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"
)

// Stat returns the kernel's attributes of an open file, and whether its file system may never
// answer. It may, unless it has a block device, or the attributes that drivers of local file
// systems report (btrfs, tmpfs, ZFS, and an overlay of such). FUSE and network file systems have
// neither.
func Stat(fd int) (st unix.Statx_t, slow bool, err error) {
	const flags = unix.AT_EMPTY_PATH | unix.AT_STATX_DONT_SYNC
	if err := unix.Statx(fd, "", flags, unix.STATX_BASIC_STATS, &st); err != nil {
		return st, true, err
	}
	const reported = unix.STATX_ATTR_APPEND | unix.STATX_ATTR_IMMUTABLE
	if st.Dev_major != 0 || st.Attributes_mask&reported != 0 {
		return st, false, nil
	}
	// Memory files, on kernels before 6.0.
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	return st, err != nil, nil
}

// exitDiskFull is the status of a copy for which the disk has no space.
const exitDiskFull = int(unix.ENOSPC)

// Argument is the first argument of the copying process, which runs this program again.
const Argument = "copy-slow-file"

// Main is that process: it copies its standard input to its standard output, and returns its exit
// status. limit is the number of bytes that it may copy.
func Main(limit string) int {
	most, err := strconv.ParseInt(limit, 10, 64)
	if err == nil {
		var n int64
		// With pread, because the client shares the offset.
		n, err = io.Copy(os.Stdout, io.NewSectionReader(os.Stdin, 0, most+1))
		if err == nil && n > most {
			err = fmt.Errorf("it has more than the %d bytes that its file system reports", most)
		}
	}
	if err == nil {
		return 0
	}
	if path, is := errors.AsType[*os.PathError](err); is {
		err = path.Err // the path is only that of standard input or output
	}
	fmt.Fprintln(os.Stderr, err)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return exitDiskFull
	}
	return 1
}

// Copy copies at most limit bytes of a file to another, from the beginning. When its context ends
// it returns at once. done is called when the process has ended, which the kernel may delay for as
// long as the file system does not answer; from then on nothing reads or writes the files.
func Copy(ctx context.Context, from, to *os.File, limit int64, done func()) error {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, "/proc/self/exe", Argument, strconv.FormatInt(limit, 10))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = from, to, &said
	ended := make(chan error, 1)
	go func() {
		defer done()
		err := cmd.Run()
		if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == exitDiskFull {
			err = unix.ENOSPC
		} else if said.Len() > 0 {
			err = errors.New(string(bytes.TrimSpace(said.Bytes())))
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
