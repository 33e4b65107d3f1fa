package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
)

// onOpenVINO are the arguments of a request for OpenVINO's CPU.
func onOpenVINO(t testing.TB, model string, more ...string) []string {
	return append([]string{modelOf(t, model), "--ep", "OpenVINOExecutionProvider:CPU"}, more...)
}

// reachable is a directory that other users reach.
func reachable(t testing.TB) string {
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o755))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755))
	return dir
}

// exportLayer makes a layer of all builds.
func (s *site) exportLayer(t testing.TB, dir string, more ...string) {
	t.Helper()
	out, status := s.ctl(t, append([]string{"export", "--all", "--layer", dir}, more...)...)
	require.Zero(t, status, out)
}

// below has the daemon's configuration name layers.
func (s *site) below(trust string, paths ...string) *site {
	s.config = unmeasured
	for _, path := range paths {
		s.config += fmt.Sprintf("[[layer]]\npath = %q\n", path)
		if trust != "" {
			s.config += "trust = " + trust + "\n"
		}
	}
	return s
}

// images are the ways in which a layer gets onto a machine: by the name of the file system, what
// makes an image of a directory, and what mounts it.
var images = map[string]struct{ make, mount []string }{
	"ext4": {[]string{"ln", "-s", "DIRECTORY", "IMAGE"},
		[]string{"sh", "-ec", "mount --bind IMAGE ON; mount -o remount,bind,ro ON"}},
	"squashfs": {[]string{"mksquashfs", "DIRECTORY", "IMAGE", "-noappend", "-quiet", "-all-root",
		"-noD", "-noF", "-all-time", "0", "-mkfs-time", "0"},
		[]string{"mount", "-o", "loop,ro", "-t", "squashfs", "IMAGE", "ON"}},
	"erofs": {[]string{"mkfs.erofs", "--all-root", "-T0", "-U",
		"00000000-0000-0000-0000-000000000001", "IMAGE", "DIRECTORY"},
		[]string{"mount", "-o", "loop,ro", "-t", "erofs", "IMAGE", "ON"}},
}

// run runs a command of images.
func runImage(t testing.TB, words []string, dir, image, on string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can mount")
	}
	if _, err := exec.LookPath(words[0]); err != nil {
		t.Skipf("SKIPPED: %v; install squashfs-tools and erofs-utils", err)
	}
	words = slices.Clone(words)
	for i, w := range words {
		words[i] = strings.NewReplacer("DIRECTORY", dir, "IMAGE", image, "ON", on).Replace(w)
	}
	out, err := exec.CommandContext(limited(t), words[0], words[1:]...).CombinedOutput()
	require.NoError(t, err, string(out))
}

// mountImage mounts an image until the test ends, or until unmount is called.
func mountImage(t testing.TB, kind, image, on string) (unmount func()) {
	t.Helper()
	require.NoError(t, os.MkdirAll(on, 0o755))
	runImage(t, images[kind].mount, "", image, on)
	mounted := true
	unmount = func() {
		// it is not mounted
		if err := unix.Unmount(on, unix.MNT_DETACH); mounted && err != unix.EINVAL {
			require.NoError(t, err)
		}
		mounted = false
	}
	t.Cleanup(unmount)
	return unmount
}

// layerFiles are the files of the builds in a layer, by size, the largest first.
func layerFiles(t testing.TB, dir string) []string {
	files, err := filepath.Glob(filepath.Join(dir, "views/shared/*/*/*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	slices.SortFunc(files, func(a, b string) int { return int(sizeAt(t, b) - sizeAt(t, a)) })
	return files
}

func sizeAt(t testing.TB, path string) int64 {
	info, err := os.Stat(path)
	require.NoError(t, err)
	return info.Size()
}

// flipIn flips a bit in the middle of the file's bytes, wherever they are in the image.
func flipIn(t testing.TB, image, file string) {
	t.Helper()
	whole, err := os.ReadFile(image)
	require.NoError(t, err)
	part, err := os.ReadFile(file)
	require.NoError(t, err)
	at := bytes.Index(whole, part[len(part)/2:min(len(part)/2+64, len(part))])
	require.Positive(t, at, "the file is not in the image as it is")
	whole[at] ^= 1
	require.NoError(t, os.WriteFile(image, whole, 0o644))
}

// A layer that one machine exports answers requests on another one, whose daemon has another user
// and no build: in place, without a compile and without a copy, also after a restart.
func TestLayersAreServedInPlace(t *testing.T) {
	t.Parallel()
	runtimes := []string{runtimeDir(t, openVINO), runtimeDir(t, silentOpenVINO), runtimeDir(t, qnn),
		runtimeDir(t, oldOpenVINO)}
	a := newSite(t, runtimes...)
	a.start(t)
	asked := map[string][]string{
		"OpenVINO":     onOpenVINO(t, "tiny-convolution"),
		"embedded":     onOpenVINO(t, "tiny-convolution", "--embed"),
		"older":        onOpenVINO(t, "tiny-convolution", "--runtime", runtimes[3]),
		"silent":       onOpenVINO(t, "tiny-convolution", "--runtime", runtimes[1]),
		"external":     onOpenVINO(t, "tiny-external"),
		"initializers": onOpenVINO(t, "tiny-mlp", "--initializers-file", "rest.bin"),
		"QNN ahead of time": {modelOf(t, "tiny-mlp"), "--ep", "QNNExecutionProvider", "--option",
			"soc_model=60", "--runtime", runtimes[2]},
		"group": {"--share", modelOf(t, "tiny-mlp"), modelOf(t, "tiny-convolution"), "--ep",
			"QNNExecutionProvider",
			"--option", "soc_model=60", "--runtime", runtimes[2]},
	}
	made := make(map[string]map[string]any)
	for name, args := range asked {
		made[name] = a.get(t, args)
	}
	dir := reachable(t)
	directory := filepath.Join(dir, "layer")
	a.exportLayer(t, directory)
	a.exportLayer(t, filepath.Join(dir, "again"))
	out, err := exec.CommandContext(limited(t), "diff", "-r", directory,
		filepath.Join(dir, "again")).CombinedOutput()
	require.NoError(t, err, "two exports differ: %s", out)
	a.exportLayer(t, directory) // again: that adds nothing
	for kind, how := range images {
		t.Run(kind, func(t *testing.T) {
			image, on := filepath.Join(dir, kind+".img"), filepath.Join(dir, kind)
			runImage(t, how.make, directory, image, on)
			mountImage(t, kind, image, on)
			b := ofAnotherUser(t, append(slices.Clone(runtimes), on)...).below("", on)
			b.runtimes = runtimes
			d := b.start(t)
			for range 2 {
				for name, args := range asked {
					got := b.get(t, args, "--on-miss", "fail")
					require.Equal(t, "hit", got["outcome"], name)
					require.Equal(t, digestsOf(made[name]), digestsOf(got), name)
					require.Contains(t, got["why"], "served from layer "+on, name)
				}
				require.Zero(t, d.status().Compiles)
				require.Empty(t, filesUnder(t, filepath.Join(b.state, "objects")),
					"something was copied")
				d.stop()
				d = b.start(t)
			}
			// The lease keeps the files of the program that has it, whatever becomes of the mount.
			read, status := b.ctl(t, slices.Concat([]string{"get"}, asked["OpenVINO"],
				[]string{"--", "sh", "-c",
					"readlink -f \"$1\"; umount -l " + on + "; wc -c <\"$1\"", "sh", "{}"})...)
			require.Zero(t, status, read)
			require.Contains(t, read, on+"/views/shared/")
			verified := b.get(t, asked["OpenVINO"], "--on-miss", "fail", "--verify-output", "1e-3")
			require.Empty(t, verified["warnings"])
			shown, status := b.ctl(t, "show", made["silent"]["build"].(string))
			require.Zero(t, status)
			require.Contains(t, shown, "in layer "+on)
			listed, _ := b.ctl(t, "list")
			require.Contains(t, listed, "layer")
			told, _ := b.ctl(t, "status")
			require.Contains(t, told, on+": 8 builds")
		})
	}
}

func filesUnder(t testing.TB, dir string) (files []string) {
	require.NoError(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	}))
	return files
}

// A layer's damaged build is withheld and compiled into the own store. One that is mended is served
// again after a repair.
func TestDamageInALayerIsNeverServed(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, openVINO)
	a := newSite(t, runtime)
	a.start(t)
	model := onOpenVINO(t, "tiny-convolution")
	made := a.get(t, model)
	dir := filepath.Join(reachable(t), "layer")
	a.exportLayer(t, dir)
	b := newSite(t, runtime).below("", dir)
	d := b.start(t)
	require.Equal(t, "hit", b.get(t, model)["outcome"])
	file := layerFiles(t, dir)[0]
	sound, err := os.ReadFile(file)
	require.NoError(t, err)
	info, err := os.Stat(file)
	require.NoError(t, err)
	flip := bytes.Clone(sound)
	flip[len(flip)/2] ^= 1
	require.NoError(t, os.WriteFile(file, flip, 0o444))
	require.NoError(t, os.Chtimes(file, info.ModTime(), info.ModTime()))
	out, status := b.ctl(t, "check", "--deep")
	require.Equal(t, 4, status, out)
	require.Contains(t, out, dir)
	got := b.get(t, model)
	require.Equal(t, "compiled", got["outcome"])
	require.Contains(t, got["why"], "is damaged: ")
	require.Equal(t, digestsOf(made), digestsOf(got))
	require.Len(t, d.list(), 2)
	d.stop()
	b.start(t) // the mark is in the journal
	got = b.get(t, model)
	require.Equal(t, "hit", got["outcome"])
	require.NotContains(t, got["why"], "layer")
	require.NoError(t, os.WriteFile(file, sound, 0o444))
	out, status = b.ctl(t, "repair")
	require.Zero(t, status, out)
	out, status = b.ctl(t, "rm", made["build"].(string)) // the own one
	require.Zero(t, status, out)
	require.Contains(t, b.get(t, model, "--on-miss", "fail")["why"], "served from layer")
	out, status = b.ctl(t, "rm", made["build"].(string))
	require.NotZero(t, status, out)
	require.Contains(t, out, "only read")
	require.Contains(t, out, "epcachectl invalidate")
	out, status = b.ctl(t, "invalidate", made["build"].(string))
	require.Zero(t, status, out)
	out, status = b.ctl(t, slices.Concat([]string{"get"}, model, []string{"--on-miss", "fail"})...)
	require.NotZero(t, status, out)
	out, status = b.ctl(t, "rm", "--all", "--yes")
	require.Zero(t, status, out)
	require.Len(t, layerFiles(t, dir), 2)
}

// Images with other bytes may have files with equal stamps. They are hashed after each mount.
func TestALayerWithEqualStampsIsHashedAgain(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, openVINO)
	a := newSite(t, runtime)
	a.start(t)
	model := onOpenVINO(t, "tiny-convolution")
	made := a.get(t, model)
	for _, kind := range []string{"squashfs", "erofs"} {
		t.Run(kind, func(t *testing.T) {
			dir := reachable(t)
			directory, on := filepath.Join(dir, "layer"), filepath.Join(dir, "on")
			a.exportLayer(t, directory)
			first, second := filepath.Join(dir, "1.img"), filepath.Join(dir, "2.img")
			runImage(t, images[kind].make, directory, first, on)
			whole, err := os.ReadFile(first)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(second, whole, 0o644))
			flipIn(t, second, layerFiles(t, directory)[0])
			unmount := mountImage(t, kind, first, on)
			file := layerFiles(t, on)[0]
			before, err := cas.StampPath(file)
			require.NoError(t, err)
			b := newSite(t, runtime).below("", on)
			d := b.start(t)
			require.Equal(t, "hit", b.get(t, model, "--on-miss", "fail")["outcome"])
			unmount()
			out, status := b.ctl(t, slices.Concat([]string{"get"}, model,
				[]string{"--on-miss", "fail"})...)
			require.NotZero(t, status, out)
			mountImage(t, kind, second, on)
			after, err := cas.StampPath(file)
			require.NoError(t, err)
			before.Dev, after.Dev = 0, 0
			require.Equal(t, before, after, "the images show their difference")
			got := b.get(t, model)
			require.Equal(t, "compiled", got["outcome"])
			require.Contains(t, got["why"], "damaged")
			require.Equal(t, digestsOf(made), digestsOf(got))
			d.stop()
		})
	}
}

// Layers are looked through in the order of the configuration. One that is not mounted is a
// finding, and is used as soon as it is there.
func TestLayersHaveAnOrderAndMayBeMissing(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, openVINO)
	a := newSite(t, runtime)
	a.start(t)
	model := onOpenVINO(t, "tiny-convolution")
	a.get(t, model)
	dir := reachable(t)
	first, _ := newKey(t, a, dir, "first")
	second, public := newKey(t, a, dir, "second")
	layers := []string{filepath.Join(dir, "1"), filepath.Join(dir, "2")}
	b := newSite(t, runtime).below("", layers...)
	d := b.start(t)
	doctor, _ := b.ctl(t, "doctor")
	require.Contains(t, doctor, layers[0]+" is not used")
	told, _ := b.ctl(t, "status")
	require.Contains(t, told, layers[1]+" is not used")
	a.exportLayer(t, layers[1], "--key", second)
	require.Contains(t, b.get(t, model, "--on-miss", "fail")["why"], "served from layer "+layers[1])
	a.exportLayer(t, layers[0], "--key", first)
	require.Contains(t, b.get(t, model, "--on-miss", "fail")["why"], "served from layer "+layers[0])
	require.NoError(t, os.Rename(layers[0], layers[0]+".away"))
	require.Contains(t, b.get(t, model, "--on-miss", "fail")["why"], "served from layer "+layers[1])
	require.Zero(t, d.status().Compiles)
	d.stop()

	// Signed by another key than the trusted one.
	require.NoError(t, os.Rename(layers[0]+".away", layers[0]))
	b.below(fmt.Sprintf("%q", public), layers...)
	d = b.start(t)
	require.Contains(t, b.get(t, model, "--on-miss", "fail")["why"], "served from layer "+layers[1])
	doctor, _ = b.ctl(t, "doctor")
	require.Contains(t, doctor, "not trusted here")
	d.stop()

	// The signature counts, and not the manifest.
	manifests, err := filepath.Glob(filepath.Join(layers[1], "manifests/*/*"))
	require.NoError(t, err)
	require.Len(t, manifests, 1)
	require.NoError(t, os.Chmod(manifests[0], 0o644))
	require.NoError(t, os.WriteFile(manifests[0], []byte("forged"), 0o644))
	b.start(t)
	require.Equal(t, "hit", b.get(t, model, "--on-miss", "fail")["outcome"])
}

// The files of a layer are code: no other user may be able to change them.
func TestALayerOfAnotherUserIsNotTrusted(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can give files away")
	}
	runtime := runtimeDir(t, openVINO)
	a := newSite(t, runtime)
	a.start(t)
	model := onOpenVINO(t, "tiny-convolution")
	a.get(t, model)
	for name, c := range map[string]struct {
		change func(layer, file string) error
		want   string
	}{
		"file": {func(_, file string) error { return os.Chown(file, 2991, -1) },
			"belongs to user 2991"},
		"directory": {func(layer, _ string) error {
			return os.Chmod(filepath.Join(layer, "views"), 0o777)
		}, "other users may write"},
		"above": {func(layer, _ string) error { return os.Chmod(filepath.Dir(layer), 0o777) },
			"other users may write"},
		"link": {func(_, file string) error {
			return cmpErr(os.Rename(file, file+"2"), os.Symlink(file+"2", file))
		}, "neither a directory nor a regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(reachable(t), "layer")
			a.exportLayer(t, dir)
			require.NoError(t, c.change(dir, layerFiles(t, dir)[0]))
			b := newSite(t, runtime).below("", dir)
			b.start(t)
			out, status := b.ctl(t, slices.Concat([]string{"get"}, model,
				[]string{"--on-miss", "fail"})...)
			require.NotZero(t, status, out)
			doctor, _ := b.ctl(t, "doctor")
			require.Contains(t, doctor, c.want)
		})
	}
}

func cmpErr(all ...error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}

// A layer's build that fails on this class of machine is never served.
func TestLayersOfAnotherMachineClassMustRun(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, silentOpenVINO)
	a, b := newSite(t, runtime), newSite(t, runtime)
	b.environment = []string{"ONEDNN_MAX_CPU_ISA=SSE41"}
	a.start(t)
	fails := onOpenVINO(t, "minilm-int8", "--optimization-level", "disable_all")
	runs := onOpenVINO(t, "tiny-convolution", "--optimization-level", "disable_all")
	made := a.get(t, fails)
	a.get(t, runs)
	dir := filepath.Join(reachable(t), "layer")
	a.exportLayer(t, dir)
	d := b.below("", dir).start(t)
	got := b.get(t, runs, "--on-miss", "fail")
	require.Equal(t, "hit", got["outcome"])
	require.Contains(t, got["why"], "it loads and runs")
	require.Zero(t, d.status().Compiles)
	got = b.get(t, fails)
	require.NotEqual(t, "hit", got["outcome"])
	require.NotEqual(t, digestsOf(made), digestsOf(got))
}

// BenchmarkHitFromALayer measures a hit from a layer on squashfs, and in turn one of the own store.
func BenchmarkHitFromALayer(b *testing.B) {
	own, dir := newHitBench(b, ""), reachable(b)
	directory, image, on := filepath.Join(dir, "layer"), filepath.Join(dir, "img"),
		filepath.Join(dir, "on")
	(&site{socket: own.socket}).exportLayer(b, directory)
	runImage(b, images["squashfs"].make, directory, image, on)
	mountImage(b, "squashfs", image, on)
	layered := newHitBench(b, fmt.Sprintf("[[layer]]\npath = %q\n", on))
	told, status := (&site{socket: layered.socket}).ctl(b, "status")
	require.Zero(b, status)
	require.Contains(b, told, "0 compiles")
	for range 300 {
		own.hit()
		layered.hit()
	}
	var owns, layers []time.Duration
	for b.Loop() {
		owns = append(owns, timed(own.hit))
		layers = append(layers, timed(layered.hit))
	}
	slices.Sort(owns)
	slices.Sort(layers)
	b.ReportMetric(microseconds(owns, 50), "own-p50-us")
	b.ReportMetric(microseconds(layers, 50), "layer-p50-us")
	b.ReportMetric(microseconds(layers, 50)/microseconds(owns, 50), "layer/own-p50")
}
