package main

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"
)

// tool is a program that testdata/fetch-remote fetches; it is run without its user's settings.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := runTool(t, name, args...)
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return out
}

func runTool(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	program, err := filepath.Abs("../../.deps/remote/" + name)
	require.NoError(t, err)
	if !exists(program) {
		t.Skipf("NOT TESTED: testdata/fetch-remote fetches %s", name)
	}
	cmd := exec.CommandContext(limited(t), program, args...)
	cmd.Env = []string{"HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Tools for OCI images read our bundles as they are, directories and tars, and copy them into a
// registry, where the files and the signature are found.
func TestOtherToolsReadABundle(t *testing.T) {
	a := newSite(t, runtimeDir(t, openVINO))
	a.start(t)
	keys, dir := t.TempDir(), t.TempDir()
	private, public := newKey(t, a, keys, "ci")
	made := a.get(t, []string{modelOf(t, "tiny-mlp"), "--ep", "OpenVINOExecutionProvider:CPU"})
	bundle := filepath.Join(dir, "bundle")
	for _, to := range []string{bundle, bundle + ".tar"} {
		out, status := a.ctl(t, "export", modelOf(t, "tiny-mlp"), "--to", to, "--key", private)
		require.Zero(t, status, out)
	}
	url, _ := newServer(t, "olareg")
	if url == "" {
		t.Skip("NOT TESTED: testdata/fetch-remote fetches olareg")
	}
	to := strings.TrimPrefix(url, "oci://")

	var index struct {
		Manifests []struct{ Annotations map[string]string }
	}
	text, err := os.ReadFile(filepath.Join(bundle, "index.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &index))
	require.Len(t, index.Manifests, 1)
	tag := index.Manifests[0].Annotations["org.opencontainers.image.ref.name"]
	var card struct{ Manifests []struct{ Digest string } }
	manifest := func(of string) string {
		out := tool(t, "oras", "manifest", "fetch", "--plain-http", of)
		require.NoError(t, json.Unmarshal([]byte(out), &card))
		return card.Manifests[0].Digest
	}
	requireFiles := func(from string) {
		got := t.TempDir()
		tool(t, "oras", "pull", "--plain-http", from, "--output", got)
		some, err := filepath.Glob(filepath.Join(got, "*.zst"))
		require.NoError(t, err)
		var digests []any
		for _, path := range some {
			packed, err := os.ReadFile(path)
			require.NoError(t, err)
			d, err := zstd.NewReader(nil)
			require.NoError(t, err)
			defer d.Close()
			plain, err := d.DecodeAll(packed, nil)
			require.NoError(t, err)
			sum := blake3.Sum256(plain)
			digests = append(digests, hex.EncodeToString(sum[:]))
		}
		require.ElementsMatch(t, digestsOf(made), digests)
	}
	t.Run("oras", func(t *testing.T) {
		for name, from := range map[string]string{"-dir": bundle, "-tar": bundle + ".tar"} {
			tool(t, "oras", "cp", "--recursive", "--from-oci-layout", from+":"+tag,
				"--to-plain-http", to+name+":"+tag)
			build := to + name + "@" + manifest(to+name+":"+tag)
			requireFiles(build)
			found := tool(t, "oras", "discover", "--plain-http", build)
			require.Contains(t, found, "sigstore.bundle")
		}
	})
	t.Run("regctl", func(t *testing.T) {
		host, _, _ := strings.Cut(to, "/")
		tool(t, "regctl", "--host", "reg="+host+",tls=disabled", "image", "copy", "--referrers",
			"ocidir://"+bundle+":"+tag, to+"-regctl:"+tag)
		requireFiles(to + "-regctl@" + manifest(to+"-regctl:"+tag))
	})
	t.Run("cosign", func(t *testing.T) {
		at := to + "-cosign"
		tool(t, "oras", "cp", "--recursive", "--from-oci-layout", bundle+":"+tag, "--to-plain-http",
			at+":"+tag)
		root := filepath.Join(keys, "root.json")
		require.NoError(t, os.WriteFile(root, []byte(
			`{"mediaType":"application/vnd.dev.sigstore.trustedroot+json;version=0.1"}`), 0o600))
		build := at + "@" + manifest(at+":"+tag)
		_, other := newKey(t, a, keys, "other")
		verify := func(key string) (string, error) {
			return runTool(t, "cosign", "verify-attestation", "--key", key, "--new-bundle-format",
				"--trusted-root", root, "--insecure-ignore-tlog", "--allow-http-registry",
				"--type", "https://epcached.org/build/v1", build)
		}
		out, err := verify(public)
		require.NoError(t, err, out)
		require.Contains(t, out, "verified against the specified public key")
		out, err = verify(other)
		require.Error(t, err, out)
	})
}
