package compilers_test

import (
	"os"
	"testing"

	"github.com/epcached/epcached/compilers/compilertest"
)

func TestMain(m *testing.M) {
	if order := os.Getenv(elsewhereEnvironment); order != "" {
		os.Exit(runElsewhere(order)) // this process is an application of a test
	}
	status := m.Run()
	compilertest.RemoveWorker()
	compilertest.RemoveTestEP()
	os.Exit(status)
}
