package compilers

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/epcached/epcached/compilers/workerproto"
)

// noUser is an invalid uid, because only the group of a unit's workers is known.
const noUser = ^uint32(0)

// UnitCredential returns the credential of the workers that the unit at a socket starts, with only
// the group, which is the socket's. With it the daemon can give them access to directories without
// being root.
func UnitCredential(socket string) (*Credential, error) {
	info, err := os.Stat(socket)
	if err != nil {
		return nil, err
	}
	gid := statOf(info).Gid
	if info.Mode()&os.ModeSocket == 0 || info.Mode()&0o066 != 0 || gid == 0 {
		return nil, fmt.Errorf("%s: %v of group %d: only the daemon may connect to it, and it "+
			"must be owned by the workers' group (SocketGroup=, "+
			"SocketMode=0600)", socket, info.Mode(), gid)
	}
	return &Credential{UID: noUser, GID: gid}, nil
}

// unit is an instance of the workers' unit, which runs one worker. It ends when the connection
// closes.
type unit struct {
	conn  *net.UnixConn
	in    *bufio.Reader
	ended workerproto.ExitReport
	err   error // the instance ended without a message
}

// startUnit has systemd start an instance, which starts the worker with these descriptors from 2
// on.
func (o *ORT) startUnit(l workerproto.Launch, files []*os.File) (_ *unit, err error) {
	conn, err := net.DialTimeout("unix", o.opts.Socket, o.startTimeout)
	if err != nil {
		return nil, fmt.Errorf("worker_socket: %w", err)
	}
	defer func() {
		if err != nil {
			_ = conn.Close() // the instance ends with it
		}
	}()
	u := &unit{conn: conn.(*net.UnixConn), in: bufio.NewReader(conn)}
	if err := conn.SetReadDeadline(time.Now().Add(o.startTimeout)); err != nil {
		return nil, err
	}
	if err := workerproto.Receive(u.in, &u.ended); err != nil {
		return nil, fmt.Errorf("worker_socket %s: systemd does not start a worker there: %w; "+
			"see journalctl -u 'epcached-worker*'", o.opts.Socket, err)
	}
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	rights := syscall.UnixRights(fds...)
	if _, _, err := u.conn.WriteMsgUnix([]byte{workerproto.Handle}, rights, nil); err != nil {
		return nil, err
	}
	if err := workerproto.Send(conn, l); err != nil {
		return nil, err
	}
	return u, conn.SetReadDeadline(time.Time{})
}

// releaseDir has an instance open the leftovers in a job's directory to the daemon, after a
// worker was killed before it could do so.
func (o *ORT) releaseDir(dir string) error {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close() // only passed on
	launch := workerproto.Launch{Dir: filepath.Join(dir, privateDir)}
	u, err := o.startUnit(launch, []*os.File{null, null, null})
	if err != nil {
		return err
	}
	u.wait()
	u.reap()
	return u.err
}

func (u *unit) wait() { u.err = workerproto.Receive(u.in, &u.ended) }

// best effort: it may have ended
func (u *unit) raise(int) { _, _ = u.conn.Write([]byte{workerproto.Raise}) }

func (u *unit) stop() { _ = u.conn.CloseWrite() } // likewise

// ends the wait; systemd kills the rest
func (u *unit) kill() { _ = u.conn.SetReadDeadline(time.Now()) }

func (u *unit) reap() workerproto.ExitReport {
	_ = u.conn.Close() // all messages were read
	if u.err != nil {
		return workerproto.ExitReport{Status: workerproto.ExitSignal + int(syscall.SIGKILL)}
	}
	return u.ended
}
