// Java's HttpClient as it comes: it prefers HTTP/2, and asks a plain server to upgrade (h2c) with its first request.
// Reports as clients/checking.py does: a JSON line for each check.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import java.util.stream.Stream;

public final class HttpClientChecks {
    interface Check { void run() throws Exception; }

    static final String SERVER = System.getenv("COMPATIBILITY_SERVER");

    static String told(String name) {
        Matcher found = Pattern.compile("\"" + name + "\": \"([^\"]*)\"").matcher(SERVER);
        return found.find() ? found.group(1) : "";
    }

    static HttpRequest.Builder request(String path) {
        HttpRequest.Builder builder = HttpRequest.newBuilder(URI.create(told("url") + path)).timeout(Duration.ofSeconds(80));
        String key = told("key");
        return key.isEmpty() ? builder : builder.header("authorization", "Bearer " + key);
    }

    static HttpRequest chat(String more) {
        String body = "{\"model\": \"" + told("model") + "\", \"temperature\": 0, \"messages\": "
            + "[{\"role\": \"user\", \"content\": \"Tell a story of the sea.\"}]" + more + "}";
        return request("/v1/chat/completions").header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body)).build();
    }

    static void require(boolean holds, String what) {
        if (!holds) throw new AssertionError(what);
    }

    static void models(HttpClient client) throws Exception {
        HttpResponse<String> reply = client.send(request("/v1/models").build(), HttpResponse.BodyHandlers.ofString());
        require(reply.statusCode() == 200, "GET: " + reply.statusCode() + " " + reply.body());
        require(reply.body().contains(told("model")), reply.body());
    }

    static void chats(HttpClient client) throws Exception {
        for (int turn = 0; turn < 2; turn++) {
            HttpResponse<String> reply = client.send(chat(", \"max_tokens\": 8"), HttpResponse.BodyHandlers.ofString());
            require(reply.statusCode() == 200, "POST: " + reply.statusCode() + " " + reply.body());
            require(reply.body().contains("\"content\""), reply.body());
        }
    }

    static void streams(HttpClient client) throws Exception {
        HttpResponse<Stream<String>> reply = client.send(
            chat(", \"max_tokens\": 24, \"stream\": true"), HttpResponse.BodyHandlers.ofLines());
        require(reply.statusCode() == 200, "POST: " + reply.statusCode());
        List<Long> times = new ArrayList<>();
        List<String> last = new ArrayList<>();
        reply.body().filter(line -> line.startsWith("data:")).forEach(line -> {
            times.add(System.nanoTime());
            last.add(line);
        });
        require(last.get(last.size() - 1).trim().equals("data: [DONE]"), "the end: " + last.get(last.size() - 1));
        long spread = (times.get(times.size() - 1) - times.get(0)) / 1_000_000;
        require(times.size() > 4 && spread > 20, times.size() + " pieces within " + spread + " ms");
    }

    static void eight(HttpClient client) throws Exception {
        List<CompletableFuture<HttpResponse<String>>> asked = new ArrayList<>();
        for (int number = 0; number < 8; number++) {
            asked.add(client.sendAsync(chat(", \"max_tokens\": 4"), HttpResponse.BodyHandlers.ofString()));
        }
        for (CompletableFuture<HttpResponse<String>> one : asked) {
            require(one.get().statusCode() == 200, one.get().statusCode() + " " + one.get().body());
        }
    }

    static void refused(HttpClient client) throws Exception {
        HttpResponse<String> reply = client.send(chat(", \"max_tokens\": \"many\""), HttpResponse.BodyHandlers.ofString());
        require(reply.statusCode() == 400 || reply.statusCode() == 422, "status " + reply.statusCode());
        require(reply.body().contains("max_tokens"), reply.body());
    }

    static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char letter : text.substring(0, Math.min(text.length(), 400)).toCharArray()) {
            if (letter == '"' || letter == '\\') out.append('\\').append(letter);
            else out.append(letter < ' ' ? ' ' : letter);
        }
        return out.append('"').toString();
    }

    public static void main(String[] only) {
        // A client of its own for each: the first request of a connection is the one that asks for the upgrade.
        Map<String, Check> checks = new LinkedHashMap<>();
        checks.put("default settings (asks for h2c): GET", () -> models(HttpClient.newHttpClient()));
        checks.put("default settings: POST first, then again on the same connection", () -> chats(HttpClient.newHttpClient()));
        checks.put("default settings: a stream by lines, over time", () -> streams(HttpClient.newHttpClient()));
        checks.put("default settings: eight at once (sendAsync)", () -> eight(HttpClient.newHttpClient()));
        checks.put("default settings: a refusal with its body", () -> refused(HttpClient.newHttpClient()));
        checks.put("HTTP/1.1: POST",
            () -> chats(HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build()));
        String names = checks.keySet().stream().map(HttpClientChecks::quoted).collect(Collectors.joining(", "));
        System.out.println("{\"checks\": [" + names + "], \"versions\": {\"java\": " + quoted(System.getProperty("java.version")) + "}}");
        checks.forEach((name, check) -> {
            if (only.length > 0 && Stream.of(only).noneMatch(name::contains)) return;
            long began = System.nanoTime();
            String outcome = "pass", reason = "";
            try {
                check.run();
            } catch (Throwable error) {
                outcome = "fail";
                reason = error.getClass().getSimpleName() + ": " + error.getMessage();
            }
            System.out.println("{\"check\": " + quoted(name) + ", \"outcome\": \"" + outcome + "\", \"reason\": "
                + quoted(reason) + ", \"took_s\": " + (System.nanoTime() - began) / 10_000_000 / 100.0 + "}");
        });
        System.exit(0);
    }
}
