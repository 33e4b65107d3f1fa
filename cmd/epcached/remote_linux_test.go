package main

import (
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sharing is the configuration of a machine that shares builds through a remote.
func sharing(url, public, more string) string {
	return fmt.Sprintf(
		"%s[remote.fleet]\nurl = %q\ntrust = [%q]\n%s",
		unmeasured,
		url, public, more)
}

// openTo makes a directory that all users read, and that one user writes.
func openTo(t testing.TB, owner string) string {
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		require.NoError(t, os.Chmod(d, 0o755))
	}
	if owner != "" {
		require.NoError(t, exec.Command("chown", owner, dir).Run())
	}
	return dir
}

// hasHelper skips a test where the helper was not built.
func hasHelper(t testing.TB) {
	if !exists(filepath.Join(programs, "epcached-remote")) {
		t.Skip("SKIPPED: no epcached-remote beside epcached")
	}
}

// filesBelow counts the regular files below a directory.
func filesBelow(t testing.TB, dir string) (n int) {
	require.NoError(t, filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			n++
		}
		return err
	}))
	return n
}

// webServer serves a directory over HTTPS to any client that trusts its certificate.
type webServer struct {
	url, certificate string
	mu               sync.Mutex
	methods          map[string]int
	heard            strings.Builder // all that requests say
}

// record records a request. It does not keep its digests and keys: they are of no user.
func (w *webServer) record(r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.methods[r.Method]++
	text := fmt.Sprintln(r.Method, r.URL, r.Header, string(body))
	w.heard.WriteString(regexp.MustCompile(`[0-9a-f]{64}`).ReplaceAllString(text, "DIGEST"))
}

func newWebServer(t testing.TB, dir string) *webServer {
	w := &webServer{methods: make(map[string]int)}
	files := http.FileServer(http.Dir(dir))
	s := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.record(r)
		files.ServeHTTP(rw, r)
	}))
	t.Cleanup(s.Close)
	w.url, w.certificate = s.URL, filepath.Join(openTo(t, ""), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	require.NoError(t, os.WriteFile(w.certificate, text, 0o644))
	return w
}

// newServer starts a registry or an S3 server, and returns the URL of a remote there and the lines
// that its table needs; "": there is none.
func newServer(t testing.TB, name string) (url, more string) {
	program, err := filepath.Abs("../../.deps/remote/" + name)
	require.NoError(t, err)
	if !exists(program) {
		t.Logf("NOT TESTED with %s: testdata/fetch-remote fetches it", name)
		return "", ""
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address, dir := l.Addr().String(), t.TempDir()
	require.NoError(t, l.Close())
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	args := []string{"serve", "--addr", "127.0.0.1", "--port", port, "--dir", dir}
	if url = "oci://" + address + "/team/builds"; name == "versitygw" {
		url, args = "s3://bucket/p", []string{"--access", "key", "--secret", "secret-secret",
			"--port", address, "posix", dir}
		require.NoError(t, os.Mkdir(filepath.Join(dir, "bucket"), 0o755))
	}
	cmd := exec.Command(program, args...)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", address)
		return err == nil && c.Close() == nil
	}, 30*time.Second, 20*time.Millisecond)
	return url, fmt.Sprintf("endpoint = \"http://%s\"\n", address)
}

// Builds that one machine published are hits on others, whose daemons have other users, other state
// directories and no builds, through a directory, a web server that is only read, a registry and a
// bucket.
func TestMachinesShareBuildsThroughARemote(t *testing.T) {
	t.Parallel()
	hasHelper(t)
	runtimes := []string{runtimeDir(t, openVINO), runtimeDir(t, silentOpenVINO), runtimeDir(t, qnn),
		runtimeDir(t, oldOpenVINO)}
	a := newSite(t, runtimes...)
	keys, shared := openTo(t, ""), openTo(t, "")
	private, public := newKey(t, a, keys, "ci")
	a.config = fmt.Sprintf("signing_key = %q\n", private) + sharing("file://"+shared, public,
		"publish = \"shared\"\n")
	servers := make(map[string]string) // the lines of their tables, by URL
	for _, name := range []string{"olareg", "versitygw"} {
		if url, more := newServer(t, name); url != "" {
			servers[url] = more
			a.config += fmt.Sprintf("[remote.%s]\nurl = %q\npublish = \"shared\"\n"+
				"ask = \"never\"\n", name, url) + more
		}
	}
	a.environment = []string{"AWS_ACCESS_KEY_ID=key", "AWS_SECRET_ACCESS_KEY=secret-secret"}
	a.start(t)
	conv, ep := modelOf(t, "tiny-convolution"), "OpenVINOExecutionProvider:CPU"
	asked := map[string][]string{
		"OpenVINO": {conv, "--ep", ep},
		"embedded": {modelOf(t, "tiny-mlp"), "--ep", ep, "--embed"},
		"older":    {conv, "--ep", ep, "--runtime", runtimes[3]},
		"silent":   {conv, "--ep", ep, "--runtime", runtimes[1]},
		"initializers": {modelOf(t, "tiny-mlp"), "--ep", ep, "--initializers-file",
			"rest.bin"},
		"QNN ahead of time": {modelOf(t, "tiny-mlp"), "--ep", "QNNExecutionProvider", "--option",
			"soc_model=60", "--runtime", runtimes[2]},
		"group": {"--share", modelOf(t, "tiny-mlp"), conv, "--ep",
			"QNNExecutionProvider", "--option", "soc_model=60", "--runtime", runtimes[2]},
		"external": {modelOf(t, "tiny-external"), "--ep", ep},
	}
	made := make(map[string]map[string]any)
	for name, args := range asked {
		made[name] = a.get(t, args)
		out, status := a.ctl(t, "push", made[name]["build"].(string))
		require.Zero(t, status, "%s: %s", name, out)
	}
	out, _ := a.ctl(t, "events")
	require.Contains(t, out, "to remote fleet, signed by ")
	require.NoError(t, exec.Command("chmod", "-R", "a+rX", shared).Run())

	web := newWebServer(t, shared)
	servers["file://"+shared], servers[web.url] = "", ""
	for url, more := range servers {
		b := ofAnotherUser(t, runtimes...)
		b.config = sharing(url, public, more)
		b.environment = append(a.environment, "SSL_CERT_FILE="+web.certificate)
		b.under = append(passable(t,
			append([]string{keys, shared, filepath.Dir(web.certificate), programs,
				filepath.Dir(b.socket)}, runtimes...)), "setpriv", "--reuid", otherUID, "--regid",
			otherUID, "--clear-groups")
		d := b.start(t)
		before := filesBelow(t, shared)
		for name, args := range asked {
			got := b.get(t, args)
			require.Equal(t, "hit", got["outcome"], "%s from %s: %v", name, url, got["why"])
			require.Equal(t, digestsOf(made[name]), digestsOf(got), name)
			require.Contains(t, got["why"], "fetched from remote fleet, signed by ", name)
		}
		require.Zero(t, d.status().Compiles)
		verified := b.get(t, asked["OpenVINO"], "--verify-output", "1e-3")
		require.Empty(t, verified["warnings"])
		out, status := b.ctl(t, "remote", "status")
		require.Zero(t, status, out)
		require.Contains(t, out, "8 builds, ")
		require.Equal(t, before, filesBelow(t, shared), "a reader wrote")
		out, status = b.ctl(t, "show", made["silent"]["build"].(string))
		require.Zero(t, status)
		require.Contains(t, out, "from remote fleet, signed by ")
		out, status = b.ctl(t, "push", made["silent"]["build"].(string))
		require.Equal(t, 7, status, out)
	}
	for method := range web.methods {
		require.Contains(t, []string{"GET", "HEAD"}, method)
	}
}

// The daemon itself opens no network connection. A machine that publishes nothing writes nothing to
// servers, and sends them neither names nor paths nor users.
func TestTheDaemonHasNoNetworkAndSaysNothing(t *testing.T) {
	hasHelper(t)
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skip("SKIPPED: no strace")
	}
	runtime := runtimeDir(t, openVINO)
	a := newSite(t, runtime)
	keys, shared := openTo(t, ""), openTo(t, "")
	private, public := newKey(t, a, keys, "ci")
	a.config = fmt.Sprintf("signing_key = %q\n", private) + sharing("file://"+shared, public,
		"publish = \"shared\"\n")
	a.start(t)
	getArgs := func(model string) []string {
		return []string{modelOf(t, model), "--ep", "OpenVINOExecutionProvider:CPU"}
	}
	made := a.get(t, getArgs("tiny-convolution"))
	out, status := a.ctl(t, "push", made["build"].(string))
	require.Zero(t, status, out)
	require.NoError(t, exec.Command("chmod", "-R", "a+rX", shared).Run())
	web, bucket := newWebServer(t, shared), &webServer{methods: make(map[string]int)}
	s3 := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		bucket.record(r)
		rw.WriteHeader(http.StatusNotFound)
		fmt.Fprint(rw, "<Error><Code>NoSuchKey</Code></Error>")
	}))
	defer s3.Close()

	b := ofAnotherUser(t, runtime)
	trace := filepath.Join(filepath.Dir(b.socket), "trace")
	b.config = sharing(web.url, public, "") + fmt.Sprintf("[remote.other]\nurl = "+
		"\"s3://bucket/p\"\nendpoint = %q\ntrust = [%q]\nconnect = \"5s\"\n", s3.URL, public)
	b.environment = []string{"SSL_CERT_FILE=" + web.certificate, "AWS_ACCESS_KEY_ID=key",
		"AWS_SECRET_ACCESS_KEY=secret-secret"}
	// The helper and the workers, which are other programs, are not traced.
	b.under = append(passable(t, []string{keys, shared, filepath.Dir(web.certificate), programs,
		filepath.Dir(b.socket), runtime}), "setpriv", "--reuid", otherUID, "--regid", otherUID,
		"--clear-groups", "strace", "-D", "-f", "-b", "execve", "-o", trace,
		"-e", "trace=socket,connect")
	d := b.start(t)
	require.Equal(t, "hit", b.get(t, getArgs("tiny-convolution"))["outcome"])
	require.Equal(t, "compiled", b.get(t, getArgs("tiny-mlp"))["outcome"])
	require.EqualValues(t, 1, d.status().Remotes[0].Fetched)
	text, err := os.ReadFile(trace)
	require.NoError(t, err)
	require.Contains(t, string(text), "socket(")
	require.NotContains(t, string(text), "AF_INET")

	for _, server := range []*webServer{web, bucket} {
		server.mu.Lock()
		require.NotEmpty(t, server.methods)
		for method := range server.methods {
			require.Contains(t, []string{"GET", "HEAD"}, method)
		}
		host, err := os.Hostname()
		require.NoError(t, err)
		for _, never := range []string{"tiny", "model.onnx", otherUID, "OpenVINO", b.state, host,
			filepath.Dir(b.socket)} {
			require.NotContains(t, server.heard.String(), never)
		}
		server.mu.Unlock()
	}
}

// After an update of the execution provider a build has most bytes in common with the one before,
// and only the others travel.
func TestABuildOfAnUpdateCostsFewBytes(t *testing.T) {
	hasHelper(t)
	if testing.Short() {
		t.Skip("it compiles a model of 23 MB twice")
	}
	runtimes := []string{runtimeDir(t, openVINO), runtimeDir(t, silentOpenVINO)}
	a := newSite(t, runtimes...)
	keys, shared := openTo(t, ""), openTo(t, "")
	private, public := newKey(t, a, keys, "ci")
	a.config = fmt.Sprintf("signing_key = %q\n", private) + sharing("file://"+shared, public,
		"publish = \"shared\"\n")
	a.start(t)
	b := newSite(t, runtimes...)
	b.config = sharing("file://"+shared, public, "")
	d := b.start(t)
	var fetched, size [2]int64
	for i, runtime := range runtimes {
		args := []string{modelOf(t, "minilm-int8"), "--ep", "OpenVINOExecutionProvider:CPU",
			"--runtime", runtime}
		made := a.get(t, args)
		out, status := a.ctl(t, "push", made["build"].(string))
		require.Zero(t, status, out)
		got := b.get(t, args)
		require.Equal(t, "hit", got["outcome"], got["why"])
		require.Equal(t, digestsOf(made), digestsOf(got))
		for _, f := range got["files"].([]any) {
			size[i] += int64(f.(map[string]any)["size"].(float64))
		}
		fetched[i] = d.status().Remotes[0].FetchedBytes - fetched[0]
		out, status = b.ctl(t, "pack", "--all", "--dry-run") // reads what is new
		require.Zero(t, status, out)
	}
	t.Logf("%d bytes in %d, then %d in %d: %.4f", size[0], fetched[0], size[1], fetched[1],
		float64(fetched[1])/float64(fetched[0]))
	require.LessOrEqual(t, fetched[1]*100, fetched[0])
	require.Greater(t, d.status().Remotes[0].SeedBytes, size[1]*98/100)
	require.Zero(t, d.status().Compiles)
}

// A daemon that a unit started reaches remotes through the helper's unit, if there is one.
func TestTheUnitsHelperIsUsedWhereItExists(t *testing.T) {
	shipped := unitHelper
	defer func() { unitHelper = shipped }()
	unitHelper = filepath.Join(t.TempDir(), "s")
	service, own := &process{startedBy: "service"}, &process{startedBy: "client"}
	require.Empty(t, service.helperSocket(), "it is not installed")
	require.NoError(t, os.WriteFile(unitHelper, nil, 0o600))
	require.Empty(t, service.helperSocket(), "not a socket")
	require.NoError(t, os.Remove(unitHelper))
	l, err := net.Listen("unix", unitHelper)
	require.NoError(t, err)
	defer l.Close()
	require.Equal(t, unitHelper, service.helperSocket())
	require.Empty(t, own.helperSocket(), "a user's daemon has the network")
	unit, err := os.ReadFile("../../systemd/epcached-remote.socket")
	require.NoError(t, err)
	require.Contains(t, string(unit), "ListenStream="+shipped+"\n")
}
