package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/config"
)

// leastRoom is what a daemon leaves free on its disk, in bytes: with less nothing is compiled, and with much less it does not start.
const leastRoom = 16 << 20

// cannotStart says what would keep the program from starting the user's own daemon, and what to do; "" where nothing is seen. It tries nothing that leaves a trace.
func cannotStart(ctx context.Context, program string) (text, hint string) {
	if os.Getenv(daemon.ProgramVariable) != "" { // one that is beside this program is what it should be
		if text := notTheDaemon(ctx, program); text != "" {
			return text + daemon.NamedBy(), "name the program epcached with " + daemon.ProgramVariable + ", or nothing"
		}
	}
	s, err := ownConfiguration()
	if err != nil {
		return err.Error(), correctOwn
	}
	state := s.State
	above := state
	for {
		info, err := os.Stat(above)
		if err == nil && !info.IsDir() {
			return fmt.Sprintf("%s is no folder", above), "another program put it there: move it away"
		}
		if err == nil || above == filepath.Dir(above) {
			break
		}
		above = filepath.Dir(above)
	}
	if err := unix.Access(above, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Sprintf("its state folder %s cannot be written: %v", state, err), "see whose the folder is, and that its disk is mounted writable; or put the state elsewhere: state in epcached.toml"
	}
	if free, err := cas.FreeBytes(above); err == nil && free < leastRoom {
		return fmt.Sprintf("only %s are free for %s, and a daemon needs %s", term.Bytes(free), state, term.Bytes(leastRoom)),
			"make room on the disk, or put the state elsewhere: state in epcached.toml"
	}
	return "", ""
}

const correctOwn = "correct it: epcachectl config check lists all mistakes"

// ownConfiguration reads what the user's own daemon would start with. Its error is one line, and
// counts the mistakes after the first.
func ownConfiguration() (*config.Settings, error) {
	s, err := config.LoadOwn("")
	if err == nil {
		_, err = s.LoadRules()
	}
	var mistakes config.Errors
	if errors.As(err, &mistakes) && len(mistakes) > 1 {
		err = fmt.Errorf("%w, and %d more", mistakes[0], len(mistakes)-1)
	}
	return s, err
}

// notTheDaemon says why a program is not epcached.
func notTheDaemon(ctx context.Context, program string) string {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return fmt.Sprintf("%s --version: %v", program, err)
	}
	if !strings.HasPrefix(string(out), "epcached ") {
		return program + " is not epcached"
	}
	return ""
}
