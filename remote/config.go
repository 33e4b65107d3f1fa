package remote

import (
	"fmt"
	"net/url"
	"path"
	"regexp"
	"strings"
	"time"
)

// Config is the configuration of a remote. It is part of each request, so that the helper needs no
// configuration but credentials, which are never part of it.
type Config struct {
	Name string // of the table in the configuration; credentials are found by it
	// s3://bucket/prefix; oci://host/repository; https://host/path, which is only read;
	// file:///path, which is written if the helper may
	URL    string
	Region string // of s3; "": the endpoint's default
	// http:// or https:// and a host, of s3 and of oci; "": that of AWS, or https:// and the host
	Endpoint string
	Connect  time.Duration // bounds connecting and the TLS handshake; 0: DefaultConnect
	Rate     int64         // bytes per second of uploads and background fetches; 0: no bound
}

// DefaultConnect is the bound for connecting to a remote.
const DefaultConnect = 2 * time.Second

var (
	remoteName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)
	repository = regexp.MustCompile( // of the OCI distribution specification
		`^/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$`)
)

// Check reports the first mistake in the configuration, and touches no network.
func (c Config) Check() error {
	if !remoteName.MatchString(c.Name) {
		return fmt.Errorf("name %.80q: not 1 to 63 letters, digits, '-', '_' and '.'", c.Name)
	}
	u, err := url.Parse(c.URL)
	if err != nil {
		return fmt.Errorf("url %.200q: %w", c.URL, err)
	}
	switch {
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("url %.200q: credentials, queries and fragments do not belong here",
			u.Redacted())
	case u.Scheme == "file" && (u.Host != "" || !path.IsAbs(u.Path)):
		return fmt.Errorf("url %.200q: not file:///absolute/path", c.URL)
	case (u.Scheme == "s3" || u.Scheme == "https") && u.Host == "":
		return fmt.Errorf("url %.200q: it names no bucket or host", c.URL)
	case u.Scheme == "oci" && (u.Host == "" || !repository.MatchString(u.Path)):
		return fmt.Errorf("url %.200q: not oci://HOST/REPOSITORY, in lower case", c.URL)
	case u.Scheme != "file" && u.Scheme != "s3" && u.Scheme != "https" && u.Scheme != "oci":
		return fmt.Errorf("url %.200q: not of s3://, oci://, https:// or file://", c.URL)
	case u.Scheme != "s3" && (c.Region != "" || u.Scheme != "oci" && c.Endpoint != ""):
		return fmt.Errorf("url %.200q: only s3:// has a region, and only s3:// and oci:// "+
			"an endpoint", c.URL)
	case c.Connect < 0 || c.Rate < 0:
		return fmt.Errorf("connect %v, rate %d: below 0", c.Connect, c.Rate)
	}
	if c.Endpoint == "" {
		return nil
	}
	e, err := url.Parse(c.Endpoint)
	if err != nil || (e.Scheme != "http" && e.Scheme != "https") || e.Host == "" || e.User != nil ||
		strings.Trim(e.Path, "/") != "" || e.RawQuery != "" {
		return fmt.Errorf("endpoint %.200q: not http://HOST or https://HOST", c.Endpoint)
	}
	return nil
}
