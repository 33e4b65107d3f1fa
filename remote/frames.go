package remote

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
)

// Send writes one frame, and the descriptors with its first bytes.
func Send(conn *net.UnixConn, message any, files []*os.File) error {
	raw, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(raw) > maxFrame || len(files) > maxFiles {
		return fmt.Errorf("a frame of %d bytes with %d descriptors: at most %d and %d", len(raw),
			len(files), maxFrame, maxFiles)
	}
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = syscall.UnixRights(fds...)
	}
	head := binary.LittleEndian.AppendUint32(nil, uint32(len(raw)))
	n, _, err := conn.WriteMsgUnix(head, rights, nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(head) {
		_, err = conn.Write(head[n:])
	}
	if err == nil {
		_, err = conn.Write(raw)
	}
	return err
}

// Receive reads one frame. The caller closes the received descriptors, also after an error. Memory
// is allocated only for bytes that have arrived.
func Receive(conn *net.UnixConn, message any) (files []*os.File, err error) {
	head := make([]byte, 4)
	oob := make([]byte, syscall.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := conn.ReadMsgUnix(head, oob)
	if oobn > 0 {
		var bad error
		files, bad = rights(oob[:oobn])
		err = errors.Join(err, bad)
	}
	switch {
	case err != nil:
		return files, err
	case n == 0:
		return files, io.EOF
	case flags&syscall.MSG_CTRUNC != 0:
		return files, fmt.Errorf("more than %d descriptors, or none can be opened", maxFiles)
	}
	if _, err := io.ReadFull(conn, head[n:]); err != nil {
		return files, err
	}
	length := int64(binary.LittleEndian.Uint32(head))
	if length == 0 || length > maxFrame {
		return files, fmt.Errorf("a frame of %d bytes, not 1 to %d", length, maxFrame)
	}
	raw, err := io.ReadAll(io.LimitReader(conn, length))
	if err == nil && int64(len(raw)) < length {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return files, err
	}
	return files, json.Unmarshal(raw, message)
}

func rights(oob []byte) (files []*os.File, err error) {
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, bad := syscall.ParseUnixRights(&messages[i])
		err = errors.Join(err, bad)
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), fmt.Sprintf("descriptor %d", len(files))))
		}
	}
	return files, err
}

// CloseAll closes descriptors with bytes that are written, or were only read.
func CloseAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// Pair returns the two ends of a new connection.
func Pair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "connection to epcached-remote")
	mine := os.NewFile(uintptr(fds[0]), "connection to epcached-remote")
	defer mine.Close() // FileConn duplicates it
	conn, err := net.FileConn(mine)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return conn.(*net.UnixConn), theirs, nil
}
